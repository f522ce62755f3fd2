"""A full queue is answered with 429 and Retry-After, and what was accepted is answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serving import ServedApplication

pytestmark = pytest.mark.ray

MODEL = "hdserve-mini"


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    engine = {"max_num_sequences": 2, "max_num_queued": 2}
    config = {
        "models": [{"name": MODEL, "model": MODEL, "aliases": ["mini"], "engine": engine}],
        "model_database": {"is_enabled": False},
    }
    served = ServedApplication(tmp_path_factory.mktemp("serve"), config)
    try:
        served.wait_ready()
        yield served
    finally:
        served.stop()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_overload(application: ServedApplication, is_streamed: bool) -> None:
    """Of sixteen long requests at once some are answered and the others told to come back."""
    body = {
        "model": "mini",
        "prompt": "Once",
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": is_streamed,
        "speculation": {"enabled": False},
    }

    def ask(_: int) -> httpx.Response:
        return httpx.post(f"{application.base_url}/v1/completions", json=body, timeout=120)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "overloaded"
        elif is_streamed:
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.json()["usage"]["completion_tokens"] == 300

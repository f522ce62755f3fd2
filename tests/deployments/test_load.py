"""Many streams at once: each answer is whole and right or refused, and all is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.serving_load import StreamLoad, measure
from tests.serving import ServedApplication

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-mini"
TEXTS = [(str(number), f"Find me {number} restaurants in Oakland.") for number in range(2, 8)]


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    engine = {"dtype": "float32", "exact": True, "max_num_sequences": 8, "max_num_queued": 24}
    config = {"models": [{"name": MODEL, "model": MODEL, "engine": engine}]}
    with ServedApplication(tmp_path_factory.mktemp("serve"), config) as served:
        yield served


def test_sixty_streams(application: ServedApplication) -> None:
    """Answers equal those given alone, clients and server count alike, nothing is left over."""
    load = StreamLoad(60, duration_s=6.0, warm_up_s=0.0, max_tokens=32, abandoned_share=0.1)
    result = asyncio.run(measure(application.base_url, application.pid, MODEL, TEXTS, load))
    assert result["problems"] == []
    assert result["right"] > 30
    assert result["rejected"] > 0
    assert result["abandoned"] > 0
    names = {row["name"] for row in result["processes"] if row["is_hdserve"]}
    assert {f"model-{MODEL}", "gateway", "ModelDatabaseActor"} <= names

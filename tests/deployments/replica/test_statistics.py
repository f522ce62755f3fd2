"""The administrator has the replicas of a model draft from another statistics database."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_info import TABLE_NAME
from hdserve.engine.tokenization.tokenizer import load_tokenizer
from tests.serving import ServedApplication

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-mini"
ADMIN = {"authorization": "Bearer the-key-of-the-administrator"}
PROMPT = "I want to book a table for two"
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("statistics")


@pytest.fixture(scope="module")
def application(
    tmp_path_factory: pytest.TempPathFactory, root: Path
) -> Iterator[ServedApplication]:
    """Two replicas that begin without statistics."""
    model = {
        "name": MODEL,
        "model": MODEL,
        "aliases": ["a"],
        "num_replicas": 2,
        "num_cpus": 0.2,
        "statistics": None,
        "drafting": {"adapts_budget": False},
    }
    config = {
        "models": [model],
        "model_database": {"is_enabled": False},
        "statistics_root": str(root),
        "access": {"admin_key": ADMIN["authorization"].removeprefix("Bearer ")},
    }
    with ServedApplication(tmp_path_factory.mktemp("serve"), config) as served:
        yield served


def write(directory: Path, text: str, fingerprint: str = "") -> None:
    """A statistics database of one text."""
    tokenizer = load_tokenizer(MODEL)
    builder = StatisticsBuilder(
        fingerprint or tokenizer.fingerprint, tokenizer.vocab_size, max_bytes=1 << 20
    )
    builder.add("test", tokenizer.encode(text))
    builder.write(directory)


def ask(application: ServedApplication, max_tokens: int = NUM_TOKENS) -> tuple[str, int]:
    """An answer, and how many of its tokens were drafted from statistics."""
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "speculation": {"databases": ["statistics"], "share_output": False},
    }
    answer = httpx.post(f"{application.base_url}/v1/completions", json=body, timeout=120).json()
    counts = answer["metrics"]["speculative_decoding"]["accepted_by_source"]
    return answer["choices"][0]["text"], int(counts.get("statistics", 0))


def url(application: ServedApplication, model: str = MODEL) -> str:
    return f"{application.base_url}/v1/speculation/databases/{model}/statistics"


def choose(application: ServedApplication, directory: Any, model: str = MODEL) -> httpx.Response:
    body = {"directory": directory}
    return httpx.post(url(application, model), json=body, headers=ADMIN, timeout=120)


def wait_for(application: ServedApplication, directory: Path, num_tokens: int) -> None:
    """Wait until both replicas draft from ``directory``."""
    deadline_s = time.monotonic() + 120
    wanted = {"directory": str(directory), "num_tokens": num_tokens, "corpora": ["test"]}
    while True:
        found = httpx.get(url(application), headers=ADMIN, timeout=120).json()["replicas"]
        if len(found) == 2 and all(wanted.items() <= item.items() for item in found):
            return
        assert time.monotonic() < deadline_s, found
        time.sleep(0.1)


def test_replicas_draft_from_what_is_chosen(application: ServedApplication, root: Path) -> None:
    """All of them, without a restart, while requests go on and with the same answers; a directory
    that was written anew is read anew."""
    text, num_accepted = ask(application)
    assert num_accepted == 0
    num_tokens = len(load_tokenizer(MODEL).encode(PROMPT + text))
    write(root / "of" / "answers", PROMPT + text)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, application, 400) for _ in range(2)]
        chosen = choose(application, "of/answers", "a")
        assert chosen.json() == {"model": MODEL, "directory": "of/answers"}
        wait_for(application, root / "of" / "answers", num_tokens)
        assert len({future.result()[0] for future in running}) == 1
    for _ in range(4):
        found, num_accepted = ask(application)
        assert found == text
        assert num_accepted > NUM_TOKENS // 2
    shutil.rmtree(root / "of" / "answers")
    write(root / "of" / "answers", "Something else.")
    assert choose(application, "of/answers").status_code == 200
    wait_for(
        application, root / "of" / "answers", len(load_tokenizer(MODEL).encode("Something else."))
    )
    assert ask(application)[0] == text


def test_what_cannot_be_chosen(application: ServedApplication, root: Path, tmp_path: Path) -> None:
    """Nothing outside the root, nothing of another tokenizer, nothing broken; why is said, and
    what is drafted from stays."""
    write(root / "good", "A text.")
    write(root / "foreign", "A text.", fingerprint="f" * 64)
    write(root / "broken", "A text.")
    table = bytearray((root / "broken" / TABLE_NAME).read_bytes())
    table[len(table) // 2] ^= 1
    (root / "broken" / TABLE_NAME).write_bytes(table)
    write(tmp_path / "outside", "A text.")
    (root / "link").symlink_to(tmp_path / "outside")
    shutil.copytree(root / "good", root / "linked")
    (root / "linked" / TABLE_NAME).unlink()
    (root / "linked" / TABLE_NAME).symlink_to(tmp_path / "outside" / TABLE_NAME)
    (root / "circle").symlink_to("circle")
    assert choose(application, "good").status_code == 200
    num_tokens = len(load_tokenizer(MODEL).encode("A text."))
    wait_for(application, root / "good", num_tokens)
    wrong = {
        "below statistics_root": (
            *("..", "good/../good", "/", str(root / "good"), "link", "linked", "circle", "a\0b"),
        ),
        "tokenizer": ("foreign",),
        "corrupt": ("broken",),
        "cannot be": ("missing", "."),
    }
    for reason, directories in wrong.items():
        for directory in directories:
            answer = choose(application, directory)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "directory"), directory
            assert reason in error["message"], directory
    for directory in ("", None, 5, ["good"], "x" * 5000):
        answer = choose(application, directory)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "directory")
    assert choose(application, "good", "nobody").status_code == 404
    for method in ("GET", "POST"):
        assert httpx.request(method, url(application), json={}).status_code == 403
    wait_for(application, root / "good", num_tokens)

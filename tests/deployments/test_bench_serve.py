"""``hdserve bench serve`` against the real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from hdserve.cli.commands import app
from tests.serving import ServedApplication
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-mini"
TEXTS = [f"Book a table for {number} people at an Italian restaurant." for number in range(2, 8)]


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    engine = {"dtype": "float32", "exact": True, "max_num_sequences": 4, "max_num_queued": 2}
    drafting = {"adapts_budget": False}
    model = {"name": MODEL, "model": MODEL, "engine": engine, "drafting": drafting}
    with ServedApplication(tmp_path_factory.mktemp("serve"), {"models": [model]}) as served:
        yield served


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_both_routes(application: ServedApplication, tmp_path: Path, api: str) -> None:
    """Every token and draft the server counted is in the result, and nobody else's."""
    (row,) = bench(application, tmp_path, "--concurrency", "3", "--api", api, "--ignore-eos")
    assert (row["completed"], row["rejected"], row["failed"]) == (6, 0, 0)
    assert row["model_id"] == MODEL
    assert row["total_output_tokens"] == 6 * 32
    assert row["total_input_tokens"] > 6 * 8
    assert 0 < row["spec_decode_accepted_tokens"] < row["total_output_tokens"]
    assert row["spec_decode_num_drafts"] + row["spec_decode_accepted_tokens"] <= 6 * 32
    by_position = row["spec_decode_per_position_acceptance_rates"]
    assert by_position == sorted(by_position, reverse=True)
    assert row["spec_decode_acceptance_length"] == pytest.approx(1 + sum(by_position))
    assert 0 < row["median_engine_ttft_ms"] < row["median_ttft_ms"]


def test_drafts_off_gives_the_same_texts(application: ServedApplication, tmp_path: Path) -> None:
    """A field of one's own reaches the server: no drafts, the same seeded answers."""
    options = ("--concurrency", "2", "--temperature", "0.8", "--detailed")
    (drafted,) = bench(application, tmp_path, *options)
    off = ("--extra-body", '{"speculation": {"enabled": false}}')
    (plain,) = bench(application, tmp_path, *options, *off)
    assert "spec_decode_num_drafts" in drafted
    assert "spec_decode_num_drafts" not in plain
    assert texts_by_name(drafted) == texts_by_name(plain)


def test_a_full_server_refuses(application: ServedApplication, tmp_path: Path) -> None:
    """429 is no failure, and the counts are those of the server."""
    before = num_refused(application)
    options = ("--concurrency", "24", "--num-prompts", "24", "--max-tokens", "200", "--ignore-eos")
    (row,) = bench(application, tmp_path, *options)
    assert row["failed"] == 0
    assert row["rejected"] > 0
    assert row["completed"] + row["rejected"] == 24
    assert num_refused(application) - before == row["rejected"]


def texts_by_name(row: dict[str, Any]) -> dict[str, str]:
    return dict(zip(row["names"], row["generated_texts"], strict=True))


def bench(application: ServedApplication, directory: Path, *options: str) -> list[dict[str, Any]]:
    prompts, found = directory / "prompts.jsonl", directory / "out.json"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS))
    arguments = ["bench", "serve", "--base-url", application.base_url, "--prompts", str(prompts)]
    arguments += ["--json", str(found), "--max-tokens", "32"]
    assert CliRunner().invoke(app, [*arguments, *options]).exit_code == 0
    rows: list[dict[str, Any]] = json.loads(found.read_text())["results"]
    return rows


def num_refused(application: ServedApplication) -> float:
    """Answers with 429 of the gateway."""
    text = httpx.get(f"{application.base_url}/metrics", timeout=WAIT_S).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "hdserve_http_requests_total" and sample.labels["status"] == "429"
    )

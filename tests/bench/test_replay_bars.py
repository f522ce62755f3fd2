"""Drafting keeps what it reached on recorded outputs of real models (docs/results/drafting.md)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from hdserve.bench.prompt_sharing import PromptSharingDatabase
from hdserve.bench.replay import Replay, ReplayMode
from hdserve.bench.replay_files import ReplayRow, read_replay
from hdserve.bench.replay_result import ReplayResult
from hdserve.bench.replay_setup import ending_token_ids, largest_id, open_statistics
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.drafting.base import DraftResources
from hdserve.drafting.hierarchy import Hierarchy, HierarchyOptions

DATA = Path(__file__).parents[3] / "shared" / "data" / "replay"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not DATA.is_dir(), reason=f"no recorded outputs in {DATA}"),
]

BARS = [
    ("specbench-vicuna-7b", False, 16, 2.06, 2.26, 2.37),
    ("specbench-vicuna-7b", True, 16, 2.50, 2.52, 2.55),
    ("specbench-vicuna-7b", True, 60, 2.80, 2.85, 2.90),
    ("alpaca-vicuna-7b", False, 16, 1.54, 1.75, 1.90),
    ("alpaca-vicuna-7b", True, 16, 2.04, 2.05, 2.06),
    ("tools-hermes-mistral", False, 16, 2.45, 3.60, 4.00),
    ("tools-tau2-gpt-4.1", False, 16, 1.95, 2.70, 3.30),
]


@cache
def _rows(name: str, half: str) -> list[ReplayRow]:
    return list(read_replay(DATA / f"{name}.{half}.jsonl.gz"))


@cache
def _statistics() -> StatisticsDatabase | None:
    return open_statistics([DATA / "alpaca-siblings.fill.jsonl.gz"], 1 << 30)


def _replay(
    name: str, mode: ReplayMode, budget: int, has_statistics: bool, min_score: float = 0.0
) -> ReplayResult:
    rows, fill = _rows(name, "eval"), _rows(name, "fill")
    database = PromptSharingDatabase()
    vocab_size = max(largest_id(rows), largest_id(fill)) + 1
    statistics = _statistics() if has_statistics else None
    drafter = Hierarchy(
        DraftResources(vocab_size, database, statistics, ending_token_ids=ending_token_ids(rows)),
        HierarchyOptions(min_score=min_score),
    )
    replay = Replay([drafter], database, mode, budget, 24)
    if mode is ReplayMode.WARM:
        replay.fill(fill)
    replay.run(rows)
    return replay.result


@pytest.mark.parametrize(("name", "has_statistics", "budget", "cold", "online", "warm"), BARS)
def test_mean_acceptance_length(
    name: str, has_statistics: bool, budget: int, cold: float, online: float, warm: float
) -> None:
    for mode, bar in zip(ReplayMode, (cold, online, warm), strict=True):
        result = _replay(name, mode, budget, has_statistics)
        assert result.mean_acceptance_length >= bar, mode
        if result.num_steps > 4000:
            assert 0.93 <= result.score_calibration <= 1.07, mode


def test_floor_reaches_the_best_peer_with_four_nodes() -> None:
    """2.077 tokens a step took the best peer 15.4 nodes."""
    result = _replay("specbench-vicuna-7b", ReplayMode.WARM, 60, True, min_score=0.09)
    assert result.mean_acceptance_length >= 2.077
    assert result.mean_draft_tokens <= 4.0

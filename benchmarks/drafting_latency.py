"""Draft latency and memory over the size of the databases: docs/results/drafting.md.

    python -m benchmarks.drafting_latency --data DIR --out var/drafting-latency.json \\
        --image docs/results/images/latency_over_size.png

Text beyond what the files hold is synthetic.  In the model database it is the real text with 30 %
of its tokens replaced at random, so its contexts are rarer than natural ones and tables are larger;
in the statistics database spans of it in random order, see ``statistics_build``.  Times are CPU
time of the calling thread, page faults included, so that other processes on the machine count less;
a draft is timed as the best of three, and quantiles are over calls.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.statistics_build import pieces
from hdserve.bench.replay_files import read_replay
from hdserve.bench.replay_result import percentiles_us
from hdserve.core import SamplingParams, Sequence
from hdserve.databases.model import ModelDatabase
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.drafting.base import DraftResources
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.tree import Acceptance, DraftTree

VOCAB_SIZE = 32_000
MODEL_SIZES = (100_000, 1_000_000, 10_000_000)
STATISTICS_SIZES = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
NUM_STEPS, BEST_OF = 1500, 3
MODEL_BYTES, STATISTICS_BYTES = 2 << 30, 2 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--image", type=Path)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    replay = args.data / "replay"
    text = [r.response for r in read_replay(replay / "alpaca-siblings.fill.jsonl.gz")]
    requests = list(read_replay(replay / "specbench-vicuna-7b.eval.jsonl.gz", 60))
    results: list[dict[str, Any]] = []
    for row in measure(text, requests):
        results.append(row)
        print(json.dumps(row), flush=True)
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    if args.image:
        draw(results, args.image)


def measure(text: list[tuple[int, ...]], requests: list[Any]) -> Iterator[dict[str, Any]]:
    """Measure every size of either database, with both budgets."""
    for size in MODEL_SIZES:
        model, figures = make_model(text, size)
        for budget in (16, 60):
            yield figures | time_drafts(requests, budget, model, None)
    model, _ = make_model(text, MODEL_SIZES[0])
    for size in STATISTICS_SIZES:
        statistics, figures = make_statistics(text, size)
        for budget in (16, 60):
            yield figures | time_drafts(requests, budget, model, statistics)


def stream(text: list[tuple[int, ...]], num_tokens: int) -> Iterator[npt.NDArray[np.int32]]:
    """Yield texts of ``num_tokens`` in all; synthetic from the second pass over ``text`` on."""
    rng = np.random.default_rng(0)
    arrays = [np.array(one, np.int32) for one in text]
    done, is_synthetic = 0, False
    while True:
        for array in arrays:
            if done >= num_tokens:
                return
            if is_synthetic:
                replaced = rng.random(len(array)) < 0.3
                array = np.where(replaced, rng.integers(3, VOCAB_SIZE, len(array)), array)
            done += len(array)
            yield array.astype(np.int32)
        is_synthetic = True


def make_model(text: list[tuple[int, ...]], size: int) -> tuple[ModelDatabase, dict[str, Any]]:
    ModelDatabase(1 << 20).insert("default", text[0])  # loads the compiled code
    database = ModelDatabase(MODEL_BYTES)
    elapsed = 0.0
    for tokens in stream(text, size):
        begin = time.thread_time()
        database.insert("default", tokens)
        elapsed += time.thread_time() - begin
    return database, {
        "database": "model",
        "tokens": size,
        "bytes": database.num_bytes,
        "insert_us_per_token": round(elapsed / size * 1e6, 3),
    }


def make_statistics(
    text: list[tuple[int, ...]], size: int
) -> tuple[StatisticsDatabase, dict[str, Any]]:
    builder = StatisticsBuilder("synthetic", VOCAB_SIZE, max_bytes=STATISTICS_BYTES)
    elapsed = 0.0
    for name, piece in pieces(np.concatenate([np.array(one, np.int32) for one in text]), size):
        begin = time.thread_time()
        builder.add(name, piece)  # type: ignore[arg-type]
        elapsed += time.thread_time() - begin
    database = builder.finish()
    return database, {
        "database": "statistics",
        "tokens": size,
        "bytes": database.num_bytes,
        "insert_us_per_token": round(elapsed / size * 1e6, 3),
    }


def time_drafts(
    requests: list[Any], budget: int, model: ModelDatabase, statistics: StatisticsDatabase | None
) -> dict[str, Any]:
    """Time drafts, observations and starts through the drafter's interface."""
    drafter = Hierarchy(DraftResources(VOCAB_SIZE, model, statistics))
    drafter.warm_up()
    drafts: list[float] = []
    observes: list[float] = []
    start_s, num_prompt_tokens = 0.0, 0
    for row in requests:
        if len(drafts) >= NUM_STEPS:
            break
        seq = Sequence("r", list(row.prompt), SamplingParams())
        seq.max_total_tokens = len(row.prompt) + len(row.response)
        begin = time.thread_time()
        drafter.start(seq)
        start_s += time.thread_time() - begin
        num_prompt_tokens += len(row.prompt)
        for token in row.response:
            seq.token_ids.append(token)
            acceptance = Acceptance((0,), (token,))
            begin = time.thread_time()
            drafter.observe(seq, DraftTree(0, 0), acceptance, None)
            observes.append(time.thread_time() - begin)
            drafts.append(min(_time_draft(drafter, seq, budget) for _ in range(BEST_OF)))
        drafter.finish(seq)
    return {
        "budget": budget,
        "draft_us": percentiles_us(drafts),
        "observe_us_per_token": percentiles_us(observes),
        "start_us_per_prompt_token": round(start_s / num_prompt_tokens * 1e6, 3),
    }


def _time_draft(drafter: Hierarchy, seq: Sequence, budget: int) -> float:
    tree = DraftTree(seq.token_ids[-1], budget, 24)
    begin = time.thread_time()
    drafter.propose(seq, tree)
    return time.thread_time() - begin


def draw(results: list[dict[str, Any]], image: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    for database, marker in (("model", "o"), ("statistics", "s")):
        for budget, style in ((16, "-"), (60, "--")):
            points = [
                (r["tokens"], r["draft_us"]["p50"])
                for r in results
                if (r["database"], r["budget"]) == (database, budget)
            ]
            label = f"{database} database, {budget} nodes"
            axis.plot(*zip(*points, strict=True), marker=marker, ls=style, label=label)
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("tokens in the database")
    axis.set_ylabel("median draft latency [us]")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=120)


if __name__ == "__main__":
    main()

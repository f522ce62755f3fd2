"""Count a synthetic text of up to 1e9 tokens into a bounded statistics database.

    python benchmarks/statistics_build.py --data DIR --tokens 1000000000 --out var/statistics.json

No text of that size is at hand, so what the files hold is followed by an n-gram sample of it: spans
of 4 to 11 tokens, each from a random place.  Prints one line per tenth: tokens, CPU seconds, the
peak of memory, the contexts held; then how long the written database takes to open.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hdserve.bench.replay_files import read_replay
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder

VOCAB_SIZE = 32_000
PIECE_TOKENS = 1 << 16
SHORTEST_SPAN, LONGEST_SPAN = 4, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1_000_000_000)
    parser.add_argument("--max-mib", type=int, default=2048)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    path = args.data / "replay" / "alpaca-siblings.fill.jsonl.gz"
    text = np.concatenate([np.array(row.response, np.int32) for row in read_replay(path)])
    builder = StatisticsBuilder("synthetic", VOCAB_SIZE, max_bytes=args.max_mib << 20)
    results: list[dict[str, Any]] = []
    elapsed, step = 0.0, args.tokens // 10
    for name, piece in pieces(text, args.tokens):
        begin = time.thread_time()
        builder.add(name, piece)  # type: ignore[arg-type]
        elapsed += time.thread_time() - begin
        if builder.num_tokens >= step * (len(results) + 1):
            results.append(describe(builder, elapsed))
            print(json.dumps(results[-1]), flush=True)
            args.out.write_text(json.dumps(results, indent=2) + "\n")
    with tempfile.TemporaryDirectory() as directory:
        builder.write(directory)
        begin = time.perf_counter()
        StatisticsDatabase.open(directory)
        print(f"opened in {(time.perf_counter() - begin) * 1000:.1f} ms")


def pieces(
    text: npt.NDArray[np.int32], num_tokens: int
) -> Iterator[tuple[str, npt.NDArray[np.int32]]]:
    """Yield the text itself, then samples of it, with the name each is counted under."""
    yield "text", text[:num_tokens]
    rng = np.random.default_rng(0)
    done = min(len(text), num_tokens)
    while done < num_tokens:
        num_spans = PIECE_TOKENS // SHORTEST_SPAN
        starts = rng.integers(0, len(text) - LONGEST_SPAN, num_spans)
        lengths = rng.integers(SHORTEST_SPAN, LONGEST_SPAN, num_spans)
        offsets = np.arange(LONGEST_SPAN)
        chosen = (starts[:, None] + offsets)[offsets < lengths[:, None]]
        yield "synthetic: n-gram sample", text[chosen[: num_tokens - done]]
        done += len(chosen)


def describe(builder: StatisticsBuilder, elapsed: float) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "tokens": builder.num_tokens,
        "cpu_us_per_token": round(elapsed / builder.num_tokens * 1e6, 3),
        "peak_memory_mib": peak // 1024,
        "table_mib": builder.table.num_bytes >> 20,
        "contexts": builder.table.count_rows(),
    }


if __name__ == "__main__":
    main()

"""The tables of Hierarchy Drafting (arXiv 2502.05609) on recorded requests, its method and ours.

    python -m benchmarks.drafting_paper --data DIR --out var/drafting-paper

Which databases, in which order, and how large: one replay each of Spec-Bench, warm, at the paper's
28 drafted tokens.  ``--out`` keeps one JSON file per replay, so that it can be interrupted; those
of another commit are replaced.  The Markdown tables of docs/results/drafting.md are printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.drafting_results import is_of_commit
from hdserve.bench.environment import commit
from hdserve.bench.prompt_sharing import PromptSharingDatabase
from hdserve.bench.replay import Replay, ReplayMode
from hdserve.bench.replay_files import ReplayRow, read_replay
from hdserve.bench.replay_setup import ending_token_ids, largest_id
from hdserve.config import DrafterConfig, DraftingConfig
from hdserve.core import Source
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.drafting.base import DraftResources
from hdserve.drafting.registry import build_drafters

SET, STATISTICS = "specbench-vicuna-7b", "alpaca-siblings"
BUDGET = 28
LETTERS = {"c": "context", "m": "model", "s": "statistics"}
SUBSETS = ("c", "m", "s", "cm", "cs", "ms", "cms")
ORDERS = ("cms", "csm", "mcs", "msc", "scm", "smc")
NGRAMS = (1_000, 10_000, 100_000)
MODEL_MIB = (1, 4, 16, 64)
STATISTICS_PARTS = (0.01, 0.1, 0.5, 1.0)


class Tables:
    """Runs replays and remembers their figures.

    Args:
        data: holds ``replay/``.
        out: where figures are kept.
    """

    def __init__(self, data: Path, out: Path) -> None:
        self._replay = data / "replay"
        self._out = out
        self._rows = list(read_replay(self._replay / f"{SET}.eval.jsonl.gz"))
        self._fill = list(read_replay(self._replay / f"{SET}.fill.jsonl.gz"))
        self._corpus = list(read_replay(self._replay / f"{STATISTICS}.fill.jsonl.gz"))
        self._statistics: dict[float, StatisticsDatabase] = {}
        self._commit = commit()

    def run(
        self, drafter: str, options: dict[str, Any], *, mib: int = 256, part: float = 1.0
    ) -> dict[str, Any]:
        """Return the figures of one replay; ``mib`` bounds the model database, ``part`` is the
        share of the corpus."""
        name = "-".join(f"{key}={value}" for key, value in sorted(options.items()))
        path = self._out / f"{drafter}.{name}.{mib}.{part}.json"
        if not is_of_commit(path, self._commit):
            result = self._run(drafter, options, mib, part) | {"commit": self._commit}
            path.write_text(json.dumps(result, indent=2) + "\n")
        figures: dict[str, Any] = json.loads(path.read_text())
        return figures

    def _run(self, drafter: str, options: dict[str, Any], mib: int, part: float) -> dict[str, Any]:
        database = PromptSharingDatabase(mib << 20)
        vocab_size = max(map(largest_id, (self._rows, self._fill, self._corpus))) + 1
        ending = ending_token_ids([*self._rows, *self._fill])
        resources = DraftResources(
            vocab_size, database, self._counted(part), ending_token_ids=ending
        )
        config = DraftingConfig(drafters=(DrafterConfig(name=drafter, options=options),))
        drafters = build_drafters(config, resources)
        drafters[0].warm_up()
        replay = Replay(drafters, database, ReplayMode.WARM, BUDGET, config.max_depth)
        replay.fill(self._fill)
        replay.run(self._rows)
        return replay.result.as_json()

    def _counted(self, part: float) -> StatisticsDatabase:
        if part not in self._statistics:
            builder = StatisticsBuilder("unknown", 1 << 20, max_bytes=2 << 30)
            rows: list[ReplayRow] = self._corpus[: max(1, int(len(self._corpus) * part))]
            for row in rows:
                builder.add(STATISTICS, row.prompt)
                builder.add(STATISTICS, row.response)
            self._statistics[part] = builder.finish()
        return self._statistics[part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tables = Tables(args.data, args.out)
    print_databases(tables)
    print_orders(tables)
    print_sizes(tables)


def print_databases(tables: Tables) -> None:
    print("\n| databases | hierarchy-paper | accepted of drafted | draft us | hierarchy |", end="")
    print(" accepted of drafted | draft us | from C / M / S |\n|---|--:|--:|--:|--:|--:|--:|---|")
    for subset in SUBSETS:
        switches = {name: letter in subset for letter, name in LETTERS.items()}
        theirs = tables.run("hierarchy-paper", {"order": subset})
        ours = tables.run("hierarchy", switches)
        cells = [*_cells(theirs), *_cells(ours), _by_source(ours)]
        print(f"| {'+'.join(subset.upper())} | {' | '.join(cells)} |")


def print_orders(tables: Tables) -> None:
    print("\n| order | hierarchy-paper | accepted of drafted | draft us | from C / M / S |")
    print("|---|--:|--:|--:|---|")
    for order in ORDERS:
        figures = tables.run("hierarchy-paper", {"order": order})
        print(f"| {order.upper()} | {' | '.join([*_cells(figures), _by_source(figures)])} |")


def print_sizes(tables: Tables) -> None:
    print("\n| size | mean acceptance length |\n|---|--:|")
    for num in NGRAMS:
        figures = tables.run("hierarchy-paper", {"order": "cms", "max_ngrams": num})
        print(f"| hierarchy-paper, {num:,} n-grams in D_m | {_length(figures)} |")
    for mib in MODEL_MIB:
        print(f"| hierarchy, D_m of {mib} MiB | {_length(tables.run('hierarchy', {}, mib=mib))} |")
    for part in STATISTICS_PARTS:
        for drafter in ("hierarchy-paper", "hierarchy"):
            figures = tables.run(drafter, {}, part=part)
            print(f"| {drafter}, {part:.0%} of the text in D_s | {_length(figures)} |")


def _length(figures: dict[str, Any]) -> str:
    return f"{figures['mean_acceptance_length']:.3f}"


def _cells(figures: dict[str, Any]) -> list[str]:
    accepted = sum(figures["accepted_by_source"].values())
    drafted = figures["mean_draft_tokens"] * figures["steps"]
    share = accepted / drafted if drafted else 0.0
    return [_length(figures), f"{share:.1%}", f"{figures['draft_latency_us']['p50']:.0f}"]


def _by_source(figures: dict[str, Any]) -> str:
    accepted = figures["accepted_by_source"]
    total = max(1, sum(accepted.values()))
    sources = (Source.CONTEXT, Source.MODEL, Source.STATISTICS)
    return " / ".join(f"{accepted.get(source.label, 0) / total:.0%}" for source in sources)


if __name__ == "__main__":
    main()

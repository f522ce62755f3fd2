"""Measure drafting on replay files and draw it: the tables and plots of docs/results/drafting.md.

    python benchmarks/drafting_results.py measure --data DIR --out var/drafting
    python benchmarks/drafting_results.py table --data DIR --out var/drafting
    python benchmarks/drafting_results.py plot --data DIR --out var/drafting --images IMAGES

``measure`` skips what it has measured before at the same commit, so it can be interrupted.  ``DIR``
holds ``replay/SET.eval.jsonl.gz``, ``replay/SET.fill.jsonl.gz`` and ``baselines.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from hdserve.bench.environment import commit
from hdserve.bench.prompt_sharing import PromptSharingDatabase
from hdserve.bench.replay import Replay, ReplayMode
from hdserve.bench.replay_files import ReplayRow, read_replay
from hdserve.bench.replay_setup import (
    ending_token_ids,
    largest_id,
    open_statistics,
    with_min_score,
)
from hdserve.config import DrafterConfig, DraftingConfig
from hdserve.databases.model import ModelDatabase
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.drafting.base import DraftResources
from hdserve.drafting.registry import build_drafters

TEXT_SETS = ("specbench-vicuna-7b", "alpaca-vicuna-7b")
TOOL_SETS = ("tools-hermes-mistral", "tools-tau2-gpt-4.1")
STATISTICS = "alpaca-siblings.fill.jsonl.gz"
BUDGETS = (8, 16, 32, 60)
FLOORS = (0.01, 0.02, 0.04, 0.08, 0.085, 0.16)
_LENGTH, _CALIBRATION = "mean_acceptance_length", "settled_score_calibration"
SINGLE_DATABASES = ("context", "model", "statistics")
PEERS = ("prompt-lookup", "hierarchy-paper")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("measure", "plot", "table"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=Path)
    args = parser.parse_args()
    if args.action == "plot" and args.images is None:
        parser.error("plot needs --images")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.action == "measure":
        measure(args.data, args.out)
    elif args.action == "plot":
        plot(args.out, args.images, json.loads((args.data / "baselines.json").read_text()))
    else:
        print_tables(args.out, json.loads((args.data / "baselines.json").read_text()))


@dataclass(frozen=True, slots=True)
class RecordedSet:
    """Requests of one kind: those that are replayed, and those that warm the model database."""

    name: str
    rows: list[ReplayRow]
    fill: list[ReplayRow]

    @classmethod
    def read(cls, data: Path, name: str) -> RecordedSet:
        """Read a set below ``data``."""
        files = (data / "replay" / f"{name}.{part}.jsonl.gz" for part in ("eval", "fill"))
        rows, fill = map(list, map(read_replay, files))
        return cls(name, rows, fill)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a set is replayed.

    Attributes:
        budget: most drafted tokens in a step.
        floor: least score of a drafted token.
        drafter: its name, or that of the only database that ``hierarchy`` drafts from.
    """

    mode: ReplayMode = ReplayMode.WARM
    budget: int = 16
    shares_prompts: bool = True
    floor: float = 0.0
    drafter: str = "hierarchy"


def measure(data: Path, out: Path) -> None:
    """Measure every set, mode, budget and choice of databases; one JSON file each."""
    statistics = open_statistics([data / "replay" / STATISTICS], 2 << 30)
    for name in (*TEXT_SETS, *TOOL_SETS):
        recorded = RecordedSet.read(data, name)
        for budget in (16, 60, 8, 32):
            for corpus in (None, statistics) if name in TEXT_SETS else (None,):
                for mode in ReplayMode:
                    for shares_prompts in (True, False) if budget == 16 else (True,):
                        run(out, recorded, corpus, Setting(mode, budget, shares_prompts))
    recorded = RecordedSet.read(data, TEXT_SETS[0])
    for setting in (
        *(Setting(budget=60, floor=floor) for floor in FLOORS),
        *(Setting(drafter=drafter) for drafter in (*SINGLE_DATABASES, *PEERS)),
        *(Setting(budget=28, drafter=drafter) for drafter in ("hierarchy-paper", "hierarchy")),
    ):
        run(out, recorded, statistics, setting)


def run(
    out: Path, recorded: RecordedSet, statistics: StatisticsDatabase | None, setting: Setting
) -> None:
    """Replay once and write the figures, unless they are there, of the same commit."""
    databases = "C+M" if statistics is None else "C+M+S"
    mode, budget, shares_prompts, floor, drafter = astuple(setting)
    key = f"{recorded.name}.{databases}.{mode}.{budget}.{floor}.{drafter}.{int(shares_prompts)}"
    path = out / f"{key}.json"
    if is_of_commit(path, commit()):
        return
    rows, fill = recorded.rows, recorded.fill
    database = PromptSharingDatabase() if shares_prompts else ModelDatabase()
    vocab_size = max(largest_id(rows), largest_id(fill)) + 1
    config = DraftingConfig(drafters=(configured(drafter),))
    if floor:
        config = with_min_score(config, floor)
    ending = ending_token_ids([*rows, *fill])
    resources = DraftResources(vocab_size, database, statistics, ending_token_ids=ending)
    drafters = build_drafters(config, resources)
    drafters[0].warm_up()
    replay = Replay(drafters, database, mode, budget, config.max_depth)
    if mode is ReplayMode.WARM:
        replay.fill(fill)
    replay.run(rows)
    settings = {
        "set": recorded.name,
        "databases": databases,
        "mode": str(mode),
        "budget": budget,
        "floor": floor,
        "drafter": drafter,
        "share_prompts": shares_prompts,
        "commit": commit(),
    }
    path.write_text(json.dumps(settings | replay.result.as_json(), indent=2) + "\n")
    print(key, f"{replay.result.mean_acceptance_length:.3f}", flush=True)


def configured(drafter: str) -> DrafterConfig:
    """Return what :class:`Setting` calls so."""
    if drafter not in SINGLE_DATABASES:
        return DrafterConfig(name=drafter)
    switches = {name: name == drafter for name in (*SINGLE_DATABASES, "recycled")}
    return DrafterConfig(name="hierarchy", options=switches)


def is_of_commit(path: Path, wanted: str) -> bool:
    """Return whether there is a JSON file of figures, measured at this commit."""
    return path.exists() and json.loads(path.read_text()).get("commit") == wanted


def load(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def pick(results: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """Return the result with these settings; what is not named has its default."""
    settings = {"floor": 0.0, "drafter": "hierarchy", "share_prompts": True, **wanted}
    found = [r for r in results if all(r[key] == value for key, value in settings.items())]
    return found[0] if found else None


def best_peer(baselines: list[dict[str, Any]], name: str, mode: str, budget: int) -> str:
    found = [
        (r["mean_acceptance_length"], r["peer"])
        for r in baselines
        if (r["set"], r["mode"], r["budget"]) == (name, mode, budget)
    ]
    return f"{max(found)[0]:.3f}" if found else "-"


def print_tables(out: Path, baselines: list[dict[str, Any]]) -> None:
    """Print the Markdown tables of docs/results/drafting.md."""
    results = load(out)
    print_acceptance(results, baselines)
    print_defaults(results)
    print_tasks(results)
    print_floors(results)
    print_drafters(results)
    print(f"\nexpected / accepted: {', '.join(calibrations(results))}")


def print_acceptance(results: list[dict[str, Any]], baselines: list[dict[str, Any]]) -> None:
    print("| set | databases | budget | cold | online | warm | best peer cold / online / warm |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for name, databases in _sets():
        for budget in BUDGETS:
            wanted = {"set": name, "databases": databases, "budget": budget}
            figures = " | ".join(_in_all_modes(results, _LENGTH, **wanted))
            peers = " / ".join(best_peer(baselines, name, str(mode), budget) for mode in ReplayMode)
            peers = peers if databases == "C+M" else ""
            print(f"| {name} | {databases} | {budget} | {figures} | {peers} |")


def print_defaults(results: list[dict[str, Any]]) -> None:
    """Print what responses alone give, as they do by default while serving."""
    print("\n| set | databases | mean acceptance length | expected / accepted | with prompts |")
    print("|---|---|---|---|---|")
    for name, databases in _sets():
        wanted = {"set": name, "databases": databases, "budget": 16}
        cells = [
            _in_all_modes(results, _LENGTH, share_prompts=False, **wanted),
            _in_all_modes(results, _CALIBRATION, share_prompts=False, **wanted),
            _in_all_modes(results, _CALIBRATION, **wanted),
        ]
        print(f"| {name} | {databases} | {' | '.join(' / '.join(cell) for cell in cells)} |")


def print_tasks(results: list[dict[str, Any]]) -> None:
    found = [
        pick(results, set=TEXT_SETS[0], databases=databases, mode="warm", budget=16)
        for databases in ("C+M", "C+M+S")
    ]
    lengths = [result["mean_acceptance_length_by_task"] for result in found if result]
    print("\n| task | C+M | C+M+S |\n|---|---|---|")
    for task in sorted(lengths[0]):
        print(f"| {task} | {' | '.join(f'{each[task]:.3f}' for each in lengths)} |")


def print_floors(results: list[dict[str, Any]]) -> None:
    print("\n| floor | mean drafted | mean acceptance length |\n|--:|--:|--:|")
    for floor in FLOORS:
        _print_statistics(results, str(floor), budget=60, floor=floor)


def print_drafters(results: list[dict[str, Any]]) -> None:
    print("\n| drafter | budget | mean drafted | mean acceptance length |\n|---|--:|--:|--:|")
    for drafter in (*SINGLE_DATABASES, "hierarchy", *PEERS):
        for budget in (16, 28):
            _print_statistics(results, f"{drafter} | {budget}", budget=budget, drafter=drafter)


def _print_statistics(results: list[dict[str, Any]], label: str, **wanted: Any) -> None:
    """Print a row of what Spec-Bench with statistics gave, warm; nothing if it was not measured."""
    found = pick(results, set=TEXT_SETS[0], databases="C+M+S", mode="warm", **wanted)
    if found:
        print(f"| {label} | {found['mean_draft_tokens']:.1f} | {found[_LENGTH]:.3f} |")


def calibrations(results: list[dict[str, Any]]) -> list[str]:
    """The smallest and the largest of the results without a floor that have prompts."""
    found = [r for r in results if r["share_prompts"] and not r["floor"]]
    values = [r[_CALIBRATION] for r in found if r["drafter"] == "hierarchy"]
    return [f"{len(values)} results", *(f"{value:.3f}" for value in (min(values), max(values)))]


def _sets() -> Iterator[tuple[str, str]]:
    """Yield the sets, each with the databases that it is measured with."""
    for name in (*TEXT_SETS, *TOOL_SETS):
        yield name, "C+M"
        if name in TEXT_SETS:
            yield name, "C+M+S"


def _in_all_modes(results: list[dict[str, Any]], key: str, **wanted: Any) -> list[str]:
    found = [pick(results, mode=str(mode), **wanted) for mode in ReplayMode]
    return [f"{result[key]:.3f}" if result else "-" for result in found]


def plot(out: Path, images: Path, baselines: list[dict[str, Any]]) -> None:
    """Plot the mean acceptance length over the budget, ours and the peers', warm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    images.mkdir(parents=True, exist_ok=True)
    results = load(out)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=False)
    for axis, name in zip(axes, TEXT_SETS, strict=True):
        for databases, colour in (("C+M", "tab:blue"), ("C+M+S", "tab:green")):
            for mode, style in (("cold", ":"), ("warm", "-")):
                points = [
                    pick(results, set=name, databases=databases, mode=mode, budget=budget)
                    for budget in BUDGETS
                ]
                lengths = [point["mean_acceptance_length"] for point in points if point]
                label = f"hierarchy {databases}, {mode}"
                axis.plot(BUDGETS[: len(lengths)], lengths, style, color=colour, label=label)
        for peer, marker in (("sgl_bfs_prompt", "s"), ("arctic_treemax", "^"), ("pia", "v")):
            points = sorted(
                (r["budget"], r["mean_acceptance_length"])
                for r in baselines
                if (r["peer"], r["set"], r["mode"]) == (peer, name, "warm")
            )
            label = f"{peer}, warm"
            axis.plot(*zip(*points, strict=True), marker, color="tab:gray", ls="--", label=label)
        axis.set_title(name)
        axis.set_xlabel("drafted tokens a step")
        axis.set_ylabel("mean acceptance length")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(images / "acceptance_over_budget.png", dpi=120)


if __name__ == "__main__":
    main()

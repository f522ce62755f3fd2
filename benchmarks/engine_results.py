"""The tables and plots of docs/results/engine-*.md, from the JSON of ``hdserve bench engine``.

hdserve bench engine --prompts FILE --batch-sizes 1,4,16 --json var/engine.json
python benchmarks/engine_results.py var/engine.json --images docs/results/images
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hdserve.bench.engine import BASELINE, has_interval
from hdserve.bench.task_names import ALL_TASKS

Row = dict[str, Any]

PARTS = ("draft", "forward", "verify", "rest")
SETTING = (
    *("model", "dtype", "state", "fill", "in_fill", "statistics"),
    *("prompts", "limit", "left_out", "cut"),
    *("max_tokens", "max_draft_tokens", "temperature", "num_rounds", "hardware", "commit"),
)
COLOURS = ("tab:green", "tab:blue", "tab:orange", "tab:gray")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--images", type=Path)
    args = parser.parse_args()
    for path in args.results:
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["results"]
        print(f"### {path.stem}\n")
        print_setting(rows[0])
        print_table(rows)
        print_tasks(rows)
        if args.images is not None:
            args.images.mkdir(parents=True, exist_ok=True)
            plot_speed(rows, args.images / f"{path.stem}_speed.png")
            plot_steps(rows, args.images / f"{path.stem}_steps.png")


def print_setting(row: Row) -> None:
    """Print what all rows of a file have in common."""
    print(", ".join(f"{name} {row[name]}" for name in SETTING if row.get(name) is not None), "\n")


def print_table(rows: list[Row]) -> None:
    """Print one line per contender and batch size, over all tasks."""
    print(
        f"| batch | task | contender | tokens/s | {_ratio_name(rows)} "
        "| tokens/step | drafted/step | step ms: draft, forward, verify, rest | accepted |"
    )
    print("|--:|---|---|--:|---|--:|--:|---|---|")
    for row in _overall(rows):
        parts = ", ".join(f"{row['step_ms'][part]:.2f}" for part in PARTS)
        accepted = ", ".join(f"{name} {count}" for name, count in row["accepted_by_source"].items())
        print(
            f"| {row['batch_size']} | {row['task']} | {_contender(row)} "
            f"| {row['tokens_per_s']:.0f} | {_ratio(row)} | {row['mean_acceptance_length']:.2f} "
            f"| {row['mean_draft_tokens']:.1f} | {parts} | {accepted or '-'} |"
        )
    print()


def print_tasks(rows: list[Row]) -> None:
    """Print the ratios of each of several tasks, one line per contender and batch size."""
    of_tasks = [
        row
        for row in rows
        if row["task"] != ALL_TASKS
        and row["contender"] != BASELINE
        and row["ratio_to_autoregressive"] is not None
    ]
    tasks = list(dict.fromkeys(row["task"] for row in of_tasks))
    if not tasks:
        return
    print(f"By task group, {_ratio_name(rows)}:\n")
    print(f"| batch | contender | {' | '.join(tasks)} |")
    print(f"|--:|---|{'---|' * len(tasks)}")
    lines: dict[tuple[int, str], list[str]] = {}
    for row in of_tasks:
        lines.setdefault((row["batch_size"], _contender(row)), []).append(_ratio(row))
    for (batch_size, name), ratios in lines.items():
        print(f"| {batch_size} | {name} | {' | '.join(ratios)} |")
    print()


def _ratio_name(rows: list[Row]) -> str:
    num_rounds = rows[0]["num_rounds"]
    if num_rounds == 1:
        return "to autoregressive"
    return f"to autoregressive ({'95 %' if has_interval(num_rounds) else 'range'})"


def _overall(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["task"] == ALL_TASKS]


def _contender(row: Row) -> str:
    weights = ", random weights" if row["weights"] == "random" else ""
    return f"{row['contender']}{weights}"


def _ratio(row: Row) -> str:
    if row["ratio_to_autoregressive"] is None:
        return "-"
    spread = f" ({row['ratio_low']:.2f}..{row['ratio_high']:.2f})" if row["num_rounds"] > 1 else ""
    return f"{row['ratio_to_autoregressive']:.2f}{spread}"


def plot_speed(rows: list[Row], path: Path) -> None:
    """Plot tokens per second over the batch size, a line per contender."""
    figure, axis = _figure()
    overall = _overall(rows)
    for name in dict.fromkeys(row["contender"] for row in overall):
        points = [
            (row["batch_size"], row["tokens_per_s"]) for row in overall if row["contender"] == name
        ]
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("sequences decoded together")
    axis.set_ylabel("tokens per second")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    _save(figure, axis, path)


def plot_steps(rows: list[Row], path: Path) -> None:
    """Plot where the time of a step goes, a bar per contender and batch size."""
    figure, axis = _figure()
    overall = [row for row in _overall(rows) if row["step_ms"]["forward"] > 0]
    labels = [f"{row['contender']}, {row['batch_size']}" for row in overall]
    bottoms = [0.0] * len(overall)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        heights = [row["step_ms"][part] for row in overall]
        axis.bar(labels, heights, bottom=bottoms, color=colour, label=part)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axis.set_ylabel("milliseconds of a step")
    axis.tick_params(axis="x", labelsize=8, labelrotation=45)
    for label in axis.get_xticklabels():
        label.set_horizontalalignment("right")
    _save(figure, axis, path)


def _figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(6, 4))


def _save(figure: Any, axis: Any, path: Path) -> None:
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

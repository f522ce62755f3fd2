"""The tables and plots of docs/results/engine-*.md, from the JSON of ``hdserve bench engine``.

hdserve bench engine --prompts FILE --batch-sizes 1,4,16 --json var/engine.json
python benchmarks/engine_results.py var/engine.json --images docs/results/images
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hdserve.bench.engine import has_interval

Row = dict[str, Any]

PARTS = ("draft", "forward", "verify", "rest")
SETTING = (
    *("model", "dtype", "state", "fill", "statistics", "prompts", "limit", "left_out"),
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
        if args.images is not None:
            args.images.mkdir(parents=True, exist_ok=True)
            plot_speed(rows, args.images / f"{path.stem}_speed.png")
            plot_steps(rows, args.images / f"{path.stem}_steps.png")


def print_setting(row: Row) -> None:
    """Print what all rows of a file have in common."""
    print(", ".join(f"{name} {row[name]}" for name in SETTING if row.get(name) is not None), "\n")


def print_table(rows: list[Row]) -> None:
    """Print one line per contender, batch size and task."""
    interval = "95 %" if has_interval(rows[0]["num_rounds"]) else "range"
    print(
        f"| batch | task | contender | tokens/s | to autoregressive ({interval}) "
        "| tokens/step | drafted/step | step ms: draft, forward, verify, rest | accepted |"
    )
    print("|--:|---|---|--:|---|--:|--:|---|---|")
    for row in rows:
        ratio = "-"
        if row["ratio_to_autoregressive"] is not None:
            interval = f"{row['ratio_low']:.2f}..{row['ratio_high']:.2f}"
            ratio = f"{row['ratio_to_autoregressive']:.2f} ({interval})"
        parts = ", ".join(f"{row['step_ms'][part]:.2f}" for part in PARTS)
        weights = ", random weights" if row["weights"] == "random" else ""
        accepted = ", ".join(f"{name} {count}" for name, count in row["accepted_by_source"].items())
        print(
            f"| {row['batch_size']} | {row['task']} | {row['contender']}{weights} "
            f"| {row['tokens_per_s']:.0f} | {ratio} | {row['mean_acceptance_length']:.2f} "
            f"| {row['mean_draft_tokens']:.1f} | {parts} | {accepted or '-'} |"
        )
    print()


def plot_speed(rows: list[Row], path: Path) -> None:
    """Plot tokens per second over the batch size, a line per contender."""
    figure, axis = _figure()
    overall = [row for row in rows if row["task"] == "all"]
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
    overall = [row for row in rows if row["task"] == "all" and row["step_ms"]["forward"] > 0]
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

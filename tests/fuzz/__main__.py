"""Fuzz all targets: ``python -m tests.fuzz --cases 150000 --out build/fuzz``.

Goes on where an interrupted run was; stops at the first finding, and says how to repeat it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.fuzz.targets import TARGETS, seeds

CHUNK = 80_000
TIMEOUT_S = 20
"""A single case that takes longer is a hang."""

MEMORY_MB = 2048
"""A process that takes more holds on to what it should not."""

_STATS = {
    "number_of_executed_units": "cases",
    "slowest_unit_time_sec": "slowest_s",
    "peak_rss_mb": "peak_mb",
}


def fuzz(
    cases: Annotated[int, typer.Option(help="Cases of each target.", min=1)] = 150_000,
    out: Annotated[Path, typer.Option(help="Corpora, findings and results.json.")] = Path(
        "build/fuzz"
    ),
    target: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
) -> None:
    """Run every target until it has had so many cases."""
    out.mkdir(parents=True, exist_ok=True)
    results_path = out / "results.json"
    results: dict[str, Any] = json.loads(results_path.read_text()) if results_path.exists() else {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        for name in target or TARGETS:
            result = results.setdefault(name, {"cases": 0, "slowest_s": 0, "peak_mb": 0})
            task = bar.add_task(name, total=cases, completed=result["cases"])
            while result["cases"] < cases:
                found = _run(name, min(CHUNK, cases - result["cases"]), out / name)
                result["cases"] += found["cases"]
                for key in ("slowest_s", "peak_mb"):
                    result[key] = max(result[key], found[key])
                results_path.write_text(json.dumps(results, indent=1) + "\n")
                bar.update(task, completed=result["cases"])
    typer.echo(json.dumps(results, indent=1))


def _run(name: str, cases: int, directory: Path) -> dict[str, int]:
    corpus = directory / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(name)):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [
        f"-runs={cases}",
        f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        "-max_len=4096",
        "-print_final_stats=1",
        f"-artifact_prefix={directory}/",
    ]
    command = [sys.executable, "-m", "tests.fuzz.run", name, *options, str(corpus)]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode:
        log = directory / "finding.log"
        log.write_text(ended.stdout + ended.stderr)
        raise SystemExit(f"{name}: a finding; see {log} and the input beside it")
    stats = dict(re.findall(r"stat::(\w+):\s+(\d+)", ended.stderr))
    return {key: int(stats[stat]) for stat, key in _STATS.items()}


if __name__ == "__main__":
    typer.run(fuzz)

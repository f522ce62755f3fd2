"""The tables of docs/results/reliability.md:
``python -m tests.chaos.report --records out/chaos [--soak out/chaos/soak.jsonl]``."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.chaos.faults import FAULTS

Row = dict[str, Any]

HEAD = (
    "fault",
    "trials as they should be",
    "answers right / all",
    "wrong",
    "lost under way",
    "failed later",
    "without an error object",
    "back after (s)",
    "longest silence (s)",
    "outputs lost",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=Path("out/chaos"))
    parser.add_argument("--soak", type=Path)
    arguments = parser.parse_args()
    records = read_records(arguments.records)
    if records:
        print_setting(records)
        print_table(fault_rows(records))
        print_failures(records)
    if arguments.soak is not None:
        print_soak([json.loads(line) for line in arguments.soak.read_text().splitlines()])


def read_records(directory: Path) -> list[Row]:
    """The records of all trials, in the order of the faults."""
    paths = sorted(directory.glob("*-[0-9][0-9].json"))
    records: list[Row] = [json.loads(path.read_text()) for path in paths]
    order = list(FAULTS)
    return sorted(records, key=lambda record: (order.index(record["fault"]), record["trial"]))


def print_setting(records: Iterable[Row]) -> None:
    """Where the records come from."""
    settings = Counter((record["commit"], record["hardware"]) for record in records)
    for (commit, hardware), number in settings.items():
        print(f"{number} trials: commit {commit}, {hardware}")
    loads = sorted(record["load_average"] for record in records if "load_average" in record)
    print(f"load average {loads[0]:.0f} to {loads[-1]:.0f}, median {median(loads):.0f}\n")


def fault_rows(records: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """A row per fault."""
    for name in FAULTS:
        trials = [record for record in records if record["fault"] == name]
        if trials:
            yield fault_row(name, trials)


def fault_row(name: str, trials: Sequence[Row]) -> tuple[str, ...]:
    """What all trials of a fault say together; times as median and maximum."""

    def total(field: str) -> int:
        return sum(record[field] for record in trials)

    good = sum(not record["violations"] for record in trials)
    recoveries = [record["recovery_s"] for record in trials if record["recovery_s"] is not None]
    return (
        name,
        f"{good}/{len(trials)}",
        f"{total('num_right')} / {total('num_requests')}",
        str(total("num_wrong")),
        str(total("num_lost")),
        str(total("num_failed_later")),
        str(total("num_unclear")),
        _spread(recoveries),
        _spread([record["longest_silence_s"] for record in trials]),
        f"{total('num_outputs_lost')} of {total('num_outputs')}",
    )


def print_table(rows: Iterable[tuple[str, ...]]) -> None:
    """As Markdown."""
    print("| " + " | ".join(HEAD) + " |")
    print("|---" + "|--:" * (len(HEAD) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def print_failures(records: Iterable[Row]) -> None:
    """How clients were told, and every trial that was not as it should be."""
    for name, trials in _by_fault(records).items():
        told: Counter[str] = Counter()
        for record in trials:
            told.update(record["failures"])
        for text, number in told.most_common(4):
            print(f"- {name}: {number} x `{text[:160]}`")
    print()
    for name, trials in _by_fault(records).items():
        for record in trials:
            if record["violations"]:
                print(f"- {name}, trial {record['trial']}: {'; '.join(record['violations'])}")
    print()


def print_soak(lines: Sequence[Row]) -> None:
    """The summary, which is the last line."""
    for name, value in lines[-1]["summary"].items():
        print(f"- {name}: {json.dumps(value)}")


def _by_fault(records: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for record in records:
        found.setdefault(record["fault"], []).append(record)
    return found


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.1f}, {max(values):.1f}" if values else "never"


if __name__ == "__main__":
    main()

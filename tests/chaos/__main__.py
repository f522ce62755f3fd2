"""Record faults: ``python -m tests.chaos [--trials 10] [--fault NAME ...] [--out DIR]``.

Each trial becomes one JSON file; trials that are there already are not run again.  Faults that
need the same kind of system share a process, and a cluster as long as it is as it should be.
With ``RAY_SERVE_ENABLE_HA_PROXY=1`` in the environment, HAProxy replaces Ray Serve's proxy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.chaos.fault import Fault
from tests.chaos.faults import FAULTS, by_setting
from tests.chaos.questions import read_questions
from tests.chaos.system import ROOT, System
from tests.chaos.trial import Record, run_trial

NUM_QUESTIONS = 158
NUM_ATTEMPTS = 6
"""Ray gives a node 30 s to start, which is not always enough on a busy machine."""


def main() -> int:
    """Run what the command line says; 1 if a trial shows what must not happen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--fault", action="append", choices=list(FAULTS), default=[])
    parser.add_argument("--out", type=Path, default=Path("out/chaos"))
    parser.add_argument("--questions", type=int, default=NUM_QUESTIONS)
    parser.add_argument("--here", action="store_true", help="in this process, one fault")
    arguments = parser.parse_args()
    names = arguments.fault or list(FAULTS)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        record_faults(names, arguments.trials, arguments.out, arguments.questions)
        return 0
    read_questions(arguments.out / "questions.jsonl", arguments.questions)
    for group in by_setting(names).values():
        record_in_process(group, arguments.trials, arguments.out, arguments.questions)
    return print_summary(names, arguments.trials, arguments.out)


def record_in_process(names: Sequence[str], num_trials: int, out: Path, num_questions: int) -> None:
    """Record the missing trials of faults of one setting in a process of their own, some times if
    it ends early."""
    command = [sys.executable, "-m", "tests.chaos", "--here", "--out", str(out)]
    command += ["--trials", str(num_trials), "--questions", str(num_questions)]
    command += [f"--fault={name}" for name in names]
    for _ in range(NUM_ATTEMPTS):
        if any(missing_trials(name, num_trials, out) for name in names):
            subprocess.run(command, check=False)


def record_faults(names: Sequence[str], num_trials: int, out: Path, num_questions: int) -> None:
    """Run the trials that have no record yet of faults of one setting."""
    questions = read_questions(out / "questions.jsonl", num_questions)
    system: System | None = None
    has_logs_of_use = False
    try:
        for name, number in missing(names, num_trials, out):
            fault = FAULTS[name]
            system = system or start_system(fault)
            record = run_trial(fault(), number, system, questions)
            write_record(record, out)
            has_logs_of_use = has_logs_of_use or bool(record.violations)
            if record.recovery_s is None or not fault.keeps_system or not system.is_ready():
                system.stop(keeps_files=has_logs_of_use)
                system, has_logs_of_use = None, False
    finally:
        if system is not None:
            system.stop(keeps_files=has_logs_of_use)


def missing(names: Sequence[str], num_trials: int, out: Path) -> Iterator[tuple[str, int]]:
    """Name and number of the trials that have no record and are possible here."""
    for name in names:
        obstacle = FAULTS[name].obstacle()
        if obstacle:
            print(f"{name}: not possible here: {obstacle}")
            continue
        for number in missing_trials(name, num_trials, out):
            yield name, number


def start_system(fault: type[Fault]) -> System:
    """A system as ``fault`` wants it, ready to answer."""
    started_s = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="hdserve-chaos-"))
    system = System(
        directory,
        num_workers=fault.num_workers,
        environment=fault.environment(directory),
        gcs_storage=fault.gcs_storage,
    )
    try:
        config = system.config()
        system.deploy(fault.configure(system, config))
        system.wait_ready()
    except BaseException:
        system.stop(keeps_files=True)
        raise
    print(f"{fault.name}: ready after {time.monotonic() - started_s:.0f} s", flush=True)
    return system


def missing_trials(name: str, num_trials: int, out: Path) -> list[int]:
    """The trials that have no record."""
    return [number for number in range(num_trials) if not record_path(name, number, out).exists()]


def record_path(name: str, number: int, out: Path) -> Path:
    return out / f"{name}-{number:02}.json"


def write_record(record: Record, out: Path) -> None:
    """Keep a record and say in one line what it says."""
    path = record_path(record.fault, record.trial, out)
    setting = {"commit": commit(), "hardware": hardware(), "load_average": os.getloadavg()[1]}
    path.write_text(json.dumps({**record.as_json(), **setting}, indent=1) + "\n")
    print(
        f"{record.fault} {record.trial}: {record.num_right}/{record.num_requests} right, "
        f"{record.num_lost}+{record.num_failed_later} failed, {record.num_wrong} wrong, "
        f"recovery {record.recovery_s} s, {record.num_outputs_lost}/{record.num_outputs} outputs "
        f"lost, {record.duration_s} s; {'; '.join(record.violations) or 'good'}",
        flush=True,
    )


def commit() -> str:
    """The commit that is run, with a plus sign if files have changed since."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def hardware() -> str:
    """The processor and its cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown processor'}, {os.cpu_count()} cores"


def print_summary(names: list[str], num_trials: int, out: Path) -> int:
    """Name the trials that are missing or not as they should be."""
    is_bad = 0
    for name in names:
        for number in range(num_trials):
            path = record_path(name, number, out)
            violations = json.loads(path.read_text())["violations"] if path.exists() else ["none"]
            if violations:
                is_bad = 1
                print(f"{name} {number}: {'; '.join(violations)}")
    return is_bad


if __name__ == "__main__":
    sys.exit(main())

"""Random faults, one after the other, under random load, for long:
``python -m tests.chaos.soak [--minutes 30] [--seed 0] [--out FILE]``.

FILE gets a line for each fault and a last one that sums up, with the memory of each process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.faults import FAULTS
from tests.chaos.load import Clients
from tests.chaos.questions import Question, read_questions
from tests.chaos.system import System, wait_for
from tests.chaos.trial import Record, run_trial

NUM_QUESTIONS = 158
ROLES = ("replica", "gateway", "model database", "statistics database", "proxy")
COUNTS = (
    "num_requests",
    "num_right",
    "num_refused",
    "num_wrong",
    "num_lost",
    "num_failed_later",
    "num_outputs",
    "num_outputs_lost",
)
CANDIDATES = [
    fault for fault in FAULTS.values() if fault.setting == "one node" and fault.keeps_system
]
IDLE_S = 60.0


def main() -> int:
    """Run what the command line says; 1 if something happened that must not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/chaos/soak.jsonl"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    questions = read_questions(arguments.out.with_name("questions.jsonl"), NUM_QUESTIONS)
    system = System(Path(tempfile.mkdtemp(prefix="hdserve-soak-")))
    is_good = False
    try:
        system.deploy(system.config())
        system.wait_ready()
        with arguments.out.open("w") as file:
            is_good = soak(system, questions, arguments.minutes, arguments.seed, file)
    finally:
        system.stop(keeps_files=not is_good)
    return 0 if is_good else 1


def soak(
    system: System, questions: Sequence[Question], minutes: float, seed: int, file: Any
) -> bool:
    """Provoke faults until the time is over; whether nothing happened that must not."""
    rng = random.Random(seed)
    started_s = time.monotonic()
    records: list[Record] = []
    memory = {"begin": memory_mb(system)}
    while time.monotonic() - started_s < 60 * minutes:
        fault = rng.choice(CANDIDATES)
        clients = Clients(rng.randint(1, 8), rng.randint(1, 4))
        record = run_trial(fault(), len(records), system, questions, clients)
        records.append(record)
        at_s = round(time.monotonic() - started_s)
        file.write(json.dumps({"at_s": at_s, **asdict(clients), **record.as_json()}) + "\n")
        file.flush()
        print(f"{at_s:5} s {fault.name}: {record.num_right} right; {record.violations}", flush=True)
    is_idle = wait_for(lambda: system.metric("vllm:num_requests_running") == 0, IDLE_S)
    memory["end"] = memory_mb(system)
    summary = {
        "duration_s": round(time.monotonic() - started_s),
        "is_idle_at_the_end": is_idle,
        "faults": dict(Counter(record.fault for record in records)),
        **{name: sum(getattr(record, name) for record in records) for name in COUNTS},
        "longest_recovery_s": max(record.recovery_s or 0.0 for record in records),
        "longest_silence_s": max(record.longest_silence_s for record in records),
        "memory_mb": memory,
        "violations": [
            f"{record.fault}: {text}" for record in records for text in record.violations
        ],
    }
    file.write(json.dumps({"summary": summary}) + "\n")
    print(json.dumps(summary, indent=1))
    return is_idle and not summary["violations"]


def memory_mb(system: System) -> dict[str, list[int]]:
    """The resident memory of each process of hdserve, by role."""
    return {role: [_resident_mb(pid) for pid in system.pids(role)] for role in ROLES}


def _resident_mb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    sys.exit(main())

"""A wall clock that jumps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chaos.fault import Fault, Trial
from tests.chaos.system import wait_for

_LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)
_CLOCK_FILE = "clock"
_STEP_ANSWERS = 10
_STEP_S = 30.0


class ClockSteps(Fault):
    """The wall clock of every process steps an hour on, and back by two: nothing happens."""

    name = "clock-steps"
    setting = "own clock"
    keeps_system = False

    @classmethod
    def obstacle(cls) -> str:
        return "" if _LIBRARY else "libfaketime is not installed"

    @classmethod
    def environment(cls, system_directory: Any) -> dict[str, str]:
        clock = Path(system_directory) / _CLOCK_FILE
        clock.parent.mkdir(parents=True, exist_ok=True)
        clock.write_text("+0\n")
        return {
            "LD_PRELOAD": str(_LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(clock),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def inject(self, trial: Trial) -> None:
        self._roles = {
            role: trial.system.pids(role) for role in ("replica", "gateway", "model database")
        }
        for offset in ("+3600", "-3600", "+0"):
            (trial.system.directory / _CLOCK_FILE).write_text(f"{offset}\n")
            wanted = trial.load.num_right() + _STEP_ANSWERS
            is_going_on = wait_for(lambda wanted=wanted: trial.load.num_right() >= wanted, _STEP_S)
            trial.expect(is_going_on, f"answers stopped at {offset} s")

    def is_recovered(self, trial: Trial) -> bool:
        return trial.system.database_info() is not None

    def check(self, trial: Trial) -> None:
        for role, pids in self._roles.items():
            trial.expect(trial.system.pids(role) == pids, f"a {role} was replaced")

"""The disk of the model database: full, or interrupted while it is written."""

from __future__ import annotations

import resource
import threading
import time

import ray

from hdserve.databases.messages import Publish
from tests.chaos import processes
from tests.chaos.fault import Fault, Trial
from tests.chaos.faults.killed import DatabaseKilled
from tests.chaos.faults.snapshots import database_directory
from tests.chaos.system import wait_for

FULL_S = 5.0
CALIBRATION = bytes(60_000)


class DatabaseDiskFull(Fault):
    """No file of the actor may grow for some seconds; afterwards everything is on disk."""

    name = "database-disk-full"

    def inject(self, trial: Trial) -> None:
        (self._pid,) = trial.system.pids("model database")
        _, hard = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)
        self._limits = (resource.RLIM_INFINITY, hard)
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (0, hard))
        wait_for(lambda: self._num_failures(trial) > 0, 4 * FULL_S)
        num_right = trial.load.num_right()
        time.sleep(FULL_S)
        trial.details["answers_while_full"] = trial.load.num_right() - num_right
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, self._limits)

    def is_recovered(self, trial: Trial) -> bool:
        """Once everything is on disk."""
        is_saved: bool = trial.system.call_database("snapshot_now")
        return is_saved

    def check(self, trial: Trial) -> None:
        """What was generated meanwhile survives the actor."""
        trial.details["write_failures"] = self._num_failures(trial)
        trial.expect(trial.details["write_failures"] > 0, "no write failed")
        trial.expect(trial.details["answers_while_full"] > 0, "nothing was answered meanwhile")
        trial.expect(trial.system.pids("model database") == [self._pid], "the actor was replaced")
        processes.kill(self._pid)
        wait_for(lambda: trial.system.database_info() is not None, 30.0)

    def _num_failures(self, trial: Trial) -> int:
        info = trial.system.database_info()
        return info["num_write_failures"] if info else 0


class DatabaseKilledWhileWriting(DatabaseKilled):
    """The actor is killed at the moment a new file of its snapshot is half written."""

    name = "database-killed-while-writing"

    def inject(self, trial: Trial) -> None:
        directory = database_directory(trial)
        self._before = trial.system.pids(self.role)
        (pid,) = self._before
        is_done = threading.Event()
        writer = threading.Thread(target=_write_all_the_time, args=(trial, is_done), daemon=True)
        writer.start()
        pattern = "*/.*.tmp"
        found = wait_for(lambda: any(directory.glob(pattern)), 30.0, pause_s=0.0)
        trial.happened_s = processes.kill(pid)
        is_done.set()
        writer.join()
        trial.expect(found, "the actor never wrote")
        trial.details["half_written"] = sum(1 for _ in directory.glob(pattern))

    def check(self, trial: Trial) -> None:
        """The new actor may be writing at this moment; nothing of the old one's is there."""
        (pid,) = self._before
        left = list(database_directory(trial).glob(f"*/.*.{pid}.tmp"))
        trial.expect(not left, f"half a file was left behind: {left}")


def _write_all_the_time(trial: Trial, is_done: threading.Event) -> None:
    """Change the state of a namespace nobody uses, and have it written."""
    message = Publish("chaos", calibrations={"written": CALIBRATION}).encode(trial.system.key())
    while not is_done.is_set():
        try:
            trial.system.call_database("publish", message)
            trial.system.call_database("snapshot_now")
        except ray.exceptions.RayError:
            return

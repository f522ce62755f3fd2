"""Failures inside a replica."""

from __future__ import annotations

import time
from typing import ClassVar

from tests.chaos import drafter, processes
from tests.chaos.fault import Fault, Trial
from tests.chaos.faults.killed import check_warm
from tests.chaos.system import wait_for

ENDING_S = 30.0
RAISING_S = 4.0
NUM_ASKED = 8
"""How often metrics are asked for, so that each gateway is likely to have answered."""


class EngineBreaks(Fault):
    """A step of the engine raises: the engine stops, and Ray Serve replaces the replica."""

    name = "engine-raises"
    may_lose_requests = True
    order: ClassVar[str] = "break"

    def inject(self, trial: Trial) -> None:
        self._replicas = trial.load.replicas()
        self._before = trial.system.pids("replica")
        victim = self._before[trial.number % len(self._before)]
        drafter.tell(trial.system.orders, victim, self.order)
        trial.details["victim"] = victim
        trial.expect(
            wait_for(lambda: not processes.is_alive(victim), ENDING_S), "the replica did not end"
        )
        trial.dead_s = time.monotonic()

    def is_recovered(self, trial: Trial) -> bool:
        return bool(trial.load.replicas() - self._replicas)

    def check(self, trial: Trial) -> None:
        check_warm(trial, self._replicas)


class EnginePanics(EngineBreaks):
    """A step of the engine raises what is no ``Exception``, as a panic in Rust does."""

    name = "engine-panics"
    order = "panic"


class DrafterRaises(Fault):
    """The drafters of all replicas raise for some seconds: decoding goes on."""

    name = "drafter-raises"

    def inject(self, trial: Trial) -> None:
        self._pids = trial.system.pids("replica")
        counts = [self._count(trial) for _ in range(NUM_ASKED)]
        self._num_failures = self._most_counted = max(0.0, *counts)
        for pid in self._pids:
            drafter.tell(trial.system.orders, pid, "raise")
        wait_for(lambda: self._has_counted(trial), RAISING_S)
        num_right = trial.load.num_right()
        wait_for(lambda: trial.load.num_right() > num_right + 12, 5 * RAISING_S)

    def is_recovered(self, trial: Trial) -> bool:
        for pid in self._pids:
            (trial.system.orders / str(pid)).unlink(missing_ok=True)
        return True

    def check(self, trial: Trial) -> None:
        is_counted = wait_for(lambda: self._has_counted(trial), RAISING_S)
        trial.details["failures_counted"] = self._most_counted - self._num_failures
        trial.expect(is_counted, "no failure was counted")
        trial.expect(trial.system.pids("replica") == self._pids, "a replica was replaced")

    def _has_counted(self, trial: Trial) -> bool:
        """Whether a gateway has told of a failure; another one, which has not asked the replicas
        since, may answer next."""
        self._most_counted = max(self._most_counted, self._count(trial))
        return self._most_counted > self._num_failures

    def _count(self, trial: Trial) -> float:
        return trial.system.metric("hdserve_drafter_failures_total")

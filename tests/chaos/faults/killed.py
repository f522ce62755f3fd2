"""Processes that end without a warning."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from tests.chaos import processes
from tests.chaos.fault import Fault, Trial

PROBE_S = 30.0


class Killed(Fault):
    """One process of a role is killed; it has to be replaced."""

    role: ClassVar[str]

    def __init__(self) -> None:
        self._before: list[int] = []
        self._at_s = 0.0

    def inject(self, trial: Trial) -> None:
        self._before = trial.system.pids(self.role)
        victim = self._before[trial.number % len(self._before)]
        self._at_s = trial.happened_s = processes.kill(victim)
        trial.details["killed"] = victim

    def is_recovered(self, trial: Trial) -> bool:
        now = trial.system.pids(self.role)
        return bool(set(now) - set(self._before)) and len(now) >= len(self._before)


class ReplicaKilled(Killed):
    name = "replica-killed"
    role = "replica"
    may_lose_requests = True
    may_lose_outputs = True

    def inject(self, trial: Trial) -> None:
        self._replicas = trial.load.replicas()
        super().inject(trial)

    def is_recovered(self, trial: Trial) -> bool:
        """Once a new replica has answered."""
        return bool(trial.load.replicas(self._at_s) - self._replicas)

    def check(self, trial: Trial) -> None:
        check_warm(trial, self._replicas)


class GatewayKilled(Killed):
    name = "gateway-killed"
    role = "gateway"
    may_lose_requests = True


class ProxyKilled(Killed):
    """Ray Serve's own listener, of which a node has one."""

    name = "proxy-killed"
    may_refuse = True
    role = "proxy"
    may_lose_requests = True

    def is_recovered(self, trial: Trial) -> bool:
        """Once the new one has passed an answer on: it listens before it knows the routes."""
        return super().is_recovered(trial) and bool(trial.load.replicas(self._at_s))


class HAProxyKilled(ProxyKilled):
    """The listener that may take the place of Ray Serve's; the actor that started it lives on."""

    name = "haproxy-killed"
    setting = "one node with HAProxy"
    role = "haproxy"

    @classmethod
    def environment(cls, system_directory: Any) -> dict[str, str]:
        return {"RAY_SERVE_ENABLE_HA_PROXY": "1"}


class DatabaseKilled(Killed):
    name = "database-killed"
    role = "model database"

    def is_recovered(self, trial: Trial) -> bool:
        """Once the new one answers."""
        info = trial.system.database_info()
        return info is not None and info["pid"] not in self._before


class StatisticsKilled(Killed):
    name = "statistics-killed"
    role = "statistics database"


def check_warm(trial: Trial, replicas: set[str]) -> None:
    """A replica other than ``replicas`` drafts from what was generated before it was there."""
    outcomes = [outcome for outcome in trial.load.outcomes if outcome.kind == "right"]
    # Every conversation has a replica of its own, so many are asked until one is the new one's.
    asked = list(dict.fromkeys(o.question for o in outcomes if o.replica in replicas))
    deadline = time.monotonic() + PROBE_S
    num_tried = 0
    with trial.load.client() as client:
        while time.monotonic() < deadline:
            index = asked[num_tried % len(asked)]
            num_tried += 1
            trial.asked_again.add(index)
            outcome = trial.load.ask(client, index, is_streamed=False)
            if outcome.kind == "right" and outcome.replica not in replicas:
                trial.details["model_tokens_of_new_replica"] = outcome.num_model_tokens
                trial.expect(outcome.num_model_tokens > 0, "the new replica drafted cold")
                return
    trial.violations.append("the new replica did not answer the probe")

"""Deployments that change while requests come."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod

from tests.chaos.fault import Fault, Trial
from tests.chaos.faults.killed import check_warm
from tests.chaos.system import Config, wait_for

LONG_S = 1.0


class Update(Fault):
    """A changed configuration is deployed: every process is replaced and no request fails, not
    even one whose answer takes long."""

    keeps_system = False

    def inject(self, trial: Trial) -> None:
        self._replicas = trial.load.replicas()
        self._long = threading.Thread(target=self._ask_long, args=(trial,), daemon=True)
        self._long.start()
        time.sleep(LONG_S)
        self._before = {role: set(trial.system.pids(role)) for role in ("replica", "gateway")}
        config = trial.system.config()
        self.change(config)
        trial.system.deploy(config)
        wait_for(lambda: not trial.system.is_running(), 30.0)

    @abstractmethod
    def change(self, config: Config) -> None:
        """What is new."""

    def is_recovered(self, trial: Trial) -> bool:
        """Once no process of before is left and Serve says that all runs."""
        is_replaced = not any(
            pids & set(trial.system.pids(role)) for role, pids in self._before.items()
        )
        return is_replaced and trial.system.is_running()

    def check(self, trial: Trial) -> None:
        check_warm(trial, self._replicas)
        self._long.join()
        is_right = trial.details["long_answer"].startswith("right")
        trial.expect(is_right, "the long answer was not given")

    def _ask_long(self, trial: Trial) -> None:
        with trial.load.client() as client:
            outcome = trial.load.ask(client, len(trial.questions) - 1, is_streamed=True)
        length_s = outcome.ended_s - outcome.started_s
        trial.details["long_answer"] = f"{outcome.kind} {outcome.detail} after {length_s:.0f} s"


class RollingUpdate(Update):
    """The model gets other options."""

    name = "rolling-update"

    def change(self, config: Config) -> None:
        config["models"][0]["engine"]["max_num_sequences"] = 6
        config["gateway"]["max_body_bytes"] = 2**20


class ConfigDeployed(Update):
    """A second model is added, which changes every deployment."""

    name = "config-deployed"

    def change(self, config: Config) -> None:
        second = {**config["models"][0], "name": "second", "num_replicas": 1}
        config["models"].append(second)
        config["models"][0]["aliases"] = ["first"]

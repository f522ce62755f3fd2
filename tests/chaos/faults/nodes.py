"""Whole nodes, and the cluster's control store."""

from __future__ import annotations

import contextlib
import shutil

from tests.chaos import processes
from tests.chaos.fault import Fault, Trial
from tests.chaos.system import wait_for


class NodeKilled(Fault):
    """A worker node with a replica ends at once; another one has room for what was on it."""

    name = "node-killed"
    setting = "three nodes"
    num_workers = 2
    may_lose_requests = True
    may_refuse = True
    may_lose_outputs = True
    keeps_system = False

    def victim(self, trial: Trial) -> int:
        """A process on the node to be killed."""
        database = trial.system.pids("model database")
        nodes = {pid: trial.system.node_of(pid) for pid in trial.system.pids("replica")}
        with_database = trial.system.node_of(database[0])
        others = [pid for pid, node in nodes.items() if node is not with_database]
        return next(iter([*others, *nodes]))

    def inject(self, trial: Trial) -> None:
        self._replicas = trial.load.replicas()
        self._databases = trial.system.pids("model database")
        self._num_replicas = len(trial.system.pids("replica"))
        node = trial.system.node_of(self.victim(trial))
        lost = set(processes.children([node.all_processes["raylet"][0].process.pid]))
        for role in ("replica", "gateway", "model database", "statistics database", "proxy"):
            trial.details[f"lost {role}"] = len(lost & set(trial.system.pids(role)))
        self._at_s = trial.happened_s = trial.system.kill_node(node)

    def is_recovered(self, trial: Trial) -> bool:
        """Once there are as many replicas as before, and the new ones have answered."""
        is_complete = len(trial.system.pids("replica")) >= self._num_replicas
        has_answered = bool(trial.load.replicas(self._at_s) - self._replicas)
        is_expected = trial.details["lost replica"] > 0
        return is_complete and (has_answered or not is_expected) and self._has_database(trial)

    def _has_database(self, trial: Trial) -> bool:
        return trial.system.database_info() is not None


class DatabaseNodeLost(NodeKilled):
    """The node of the model database is lost with its disk: the replicas' mirrors refill it."""

    name = "database-node-lost"

    def victim(self, trial: Trial) -> int:
        return trial.system.pids("model database")[0]

    def inject(self, trial: Trial) -> None:
        super().inject(trial)
        shutil.rmtree(trial.system.snapshots, ignore_errors=True)

    def _has_database(self, trial: Trial) -> bool:
        info = trial.system.database_info()
        if info is None or info["pid"] in self._databases:
            return False
        namespaces = info["namespaces"]
        trial.details["outputs_refilled"] = namespaces.get(trial.namespace, {}).get("num_outputs")
        return trial.namespace in namespaces


class GcsRestarted(Fault):
    """The control store of the cluster is killed and started again on its own files."""

    name = "gcs-killed"
    setting = "control store on disk"
    gcs_storage = True
    keeps_system = False
    DOWN_S = 4.0

    def inject(self, trial: Trial) -> None:
        self._roles = {
            role: trial.system.pids(role) for role in ("replica", "gateway", "model database")
        }
        head = trial.system.cluster.head_node
        head.kill_gcs_server()
        num_right = trial.load.num_right()
        wait_for(lambda: False, self.DOWN_S)
        trial.details["answers_while_down"] = trial.load.num_right() - num_right
        head.start_gcs_server()

    def is_recovered(self, trial: Trial) -> bool:
        """Once Serve and the database answer."""
        with contextlib.suppress(Exception):
            return trial.system.is_running() and trial.system.database_info() is not None
        return False

    def check(self, trial: Trial) -> None:
        trial.expect(trial.details["answers_while_down"] > 0, "nothing was answered meanwhile")
        for role, pids in self._roles.items():
            trial.expect(trial.system.pids(role) == pids, f"a {role} was replaced")

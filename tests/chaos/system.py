"""A Ray cluster of one or more nodes on this machine, with hdserve on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ray
from ray.cluster_utils import Cluster

from actors import model_database
from actors.model_database_actor import ExportPart
from hdserve.databases.messages import Publish
from hdserve.databases.snapshot import DatabaseKey
from tests.chaos import drafter, processes
from tests.chaos.questions import ENGINE, MODEL
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 900.0
NUM_NAMESPACES = 400

Config = dict[str, Any]


class NoDatabase(ray.exceptions.RayError):
    """There is no actor of the model database now."""


def exported(
    export: Callable[[str, int], ExportPart], namespace: str, fingerprint: str
) -> list[list[int]]:
    """The token ids of all that a model database has of ``namespace``.

    Args:
        export: as :meth:`~actors.model_database_actor.ModelDatabaseActor.export`.
        fingerprint: of the tokenizer.
    """
    found: list[list[int]] = []
    part = ExportPart(b"", 0, is_last=False, epoch="")
    while not part.is_last:
        part = export(namespace, part.cursor)
        received = Publish.decode(part.message, fingerprint, model=None)
        for segment in received.outputs.values():
            found += [output.tolist() for output in segment.outputs()]
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float, pause_s: float = 0.05) -> bool:
    """Whether ``condition`` came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


class System:
    """Two replicas of one model behind two gateways, with a snapshot directory.

    Args:
        directory: for everything it writes.
        num_workers: nodes beside the head; with some of them, the head runs no replica.
        environment: further environment variables of every process.
        gcs_storage: whether the cluster's control store survives its own restart.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_workers: int = 0,
        environment: Mapping[str, str] | None = None,
        gcs_storage: bool = False,
    ) -> None:
        self.directory = directory
        self.snapshots = directory / "snapshots"
        self.orders = directory / "orders"
        self.orders.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._dashboard_port = free_port()
        self._keys = directory / "keys.txt"
        self._keys.write_text("".join(f"{key(n)} n{n}\n" for n in range(NUM_NAMESPACES)))
        self._set_environment(environment or {}, gcs_storage=gcs_storage)
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0 if num_workers else 4,
                "include_dashboard": True,
                "dashboard_port": self._dashboard_port,
                "dashboard_agent_listen_port": free_port(),
                "resources": {"head": 1},
            },
        )
        for _ in range(num_workers):
            self.add_node()
        self._fingerprint = ""
        self._namespaces = iter(range(1, NUM_NAMESPACES))
        ray.init(
            self.cluster.address,
            namespace="chaos",
            log_to_driver=False,
            configure_logging=False,
        )

    def _set_environment(self, environment: Mapping[str, str], *, gcs_storage: bool) -> None:
        """This process starts the cluster and does nothing else, so its own environment is set."""
        plugins = drafter.install(self.directory / "plugins")
        variables = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{plugins}",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.directory),  # so that nobody finds this cluster by chance
            "RAY_worker_niceness": "0",
        }
        if gcs_storage:
            storage = self.directory / "gcs"
            storage.mkdir()
            variables |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(storage)}
        os.environ.update({**variables, **environment})

    def add_node(self) -> Any:
        """One more worker node."""
        return self.cluster.add_node(num_cpus=4)

    def config(self) -> Config:
        """The hdserve configuration faults start from; each call makes a new one."""
        return {
            "models": [
                {
                    "name": MODEL,
                    "model": MODEL,
                    "engine": dict(ENGINE),
                    "num_replicas": 2,
                    "num_cpus": 0.2,
                    "drafting": {
                        "adapts_budget": False,
                        "drafters": [
                            {"name": drafter.NAME, "options": {"directory": str(self.orders)}},
                            {"name": "hierarchy"},
                        ],
                    },
                }
            ],
            "gateway": {"num_replicas": 2, "num_cpus": 0.1},
            "access": {"api_keys_file": str(self._keys)},
            "model_database": {"snapshot_dir": str(self.snapshots), "snapshot_interval_s": 1.0},
        }

    def deploy(self, config: Config) -> None:
        """What ``serve deploy`` sends; returns at once."""
        body = {
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {
                    "name": "hdserve",
                    "route_prefix": "/",
                    "import_path": "deployments:app",
                    "args": {"config": config},
                }
            ],
        }
        response = httpx.put(f"{self._dashboard}/api/serve/applications/", json=body, timeout=60)
        assert response.status_code == 200, response.text

    def wait_ready(self) -> None:
        """Wait until every replica is there."""
        assert wait_for(self.is_ready, START_TIMEOUT_S, 0.5), self.status()
        url = f"{self.base_url}/v1/models/{MODEL}"
        headers = {"authorization": f"Bearer {key(0)}"}
        self._fingerprint = httpx.get(url, headers=headers).json()["tokenizer_fingerprint"]

    def is_ready(self) -> bool:
        """Whether Serve says that all runs, and the gateway that the models answer."""
        try:
            ready = httpx.get(f"{self.base_url}/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False
        return ready and self.is_running()

    def is_running(self) -> bool:
        """Whether Serve says that every deployment has its replicas."""
        application = self.status()
        deployments = application.get("deployments", {}).values()
        return application.get("status") == "RUNNING" and all(
            deployment["status"] == "HEALTHY" for deployment in deployments
        )

    def status(self) -> dict[str, Any]:
        """Of the application, as Serve sees it; empty while it cannot be asked."""
        try:
            found = httpx.get(f"{self._dashboard}/api/serve/applications/", timeout=10).json()
        except (httpx.TransportError, ValueError):
            return {}
        application: dict[str, Any] = found.get("applications", {}).get("hdserve", {})
        return application

    @property
    def _dashboard(self) -> str:
        return f"http://127.0.0.1:{self._dashboard_port}"

    def pids(self, role: str) -> list[int]:
        """The processes of a role; see :data:`tests.chaos.processes.TITLES`."""
        nodes = [self.cluster.head_node, *self.cluster.worker_nodes]
        parents = [raylet_pid(node) for node in nodes]
        if role == "haproxy":
            parents = processes.find("proxy", parents)
        return processes.find(role, parents)

    def new_namespace(self) -> int:
        """The number of a namespace in which nothing was generated."""
        return next(self._namespaces)

    def key(self) -> DatabaseKey:
        """Of the model database."""
        return DatabaseKey(MODEL, self._fingerprint)

    def call_database(self, method: str, *arguments: Any, timeout_s: float = 10.0) -> Any:
        """The answer of the model database's actor.

        Raises:
            RayError: it does not answer now.
        """
        try:
            actor = model_database.get(self.key())
        except ValueError as error:
            raise NoDatabase from error
        return ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s)

    def outputs(self, namespace: str) -> list[list[int]]:
        """The token ids of all that the model database has of ``namespace``.

        Raises:
            RayError: its actor does not answer now.
        """
        return exported(partial(self.call_database, "export"), namespace, self.key().fingerprint)

    def database_info(self) -> dict[str, Any] | None:
        """What the model database says of itself, if it answers."""
        with contextlib.suppress(ray.exceptions.RayError):
            info: dict[str, Any] = self.call_database("info")
            return info
        return None

    def metric(self, name: str) -> float:
        """The sum of a metric over all its labels; -1 while there is none."""
        try:
            text = httpx.get(f"{self.base_url}/metrics", timeout=10).text
        except httpx.TransportError:
            return -1.0
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else -1.0

    def node_of(self, pid: int) -> Any:
        """The worker node a process belongs to."""
        for node in self.cluster.worker_nodes:
            if pid in processes.children([raylet_pid(node)]):
                return node
        raise LookupError(f"process {pid} is on no worker node")

    def kill_node(self, node: Any) -> float:
        """End every process of a worker node at once, as a power failure does."""
        workers = list(processes.children([raylet_pid(node)]))
        own = [raylet_pid(node), *workers, *processes.children(workers)]
        at_s = time.monotonic()
        for pid in own:
            processes.kill(pid)
        self.cluster.remove_node(node, allow_graceful=False)
        return at_s

    def stop(self, *, keeps_files: bool = False) -> None:
        """End every process of the cluster."""
        nodes = [self.cluster.head_node, *self.cluster.worker_nodes]
        workers = list(processes.children([raylet_pid(node) for node in nodes]))
        ray.shutdown()
        self.cluster.shutdown()
        for pid in workers:
            processes.kill(pid)
        if keeps_files:
            print(f"the logs are in {self.directory}", flush=True)
        else:
            shutil.rmtree(self.directory, ignore_errors=True)


def key(namespace: int) -> str:
    """The API key of the namespace ``n<number>``."""
    return f"chaos-key-of-namespace-{namespace}"


def raylet_pid(node: Any) -> int:
    """The process that a node's workers are children of."""
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid

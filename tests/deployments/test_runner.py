"""What ``hdserve serve`` does to a cluster that others use, too."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from benchmarks.server import START_TIMEOUT_S
from deployments.runner import _application, _client, _drain
from hdserve.config.deployed import APPLICATION, GATEWAY_DEPLOYMENT, IMPORT_PATH
from tests.clusters import connected_cluster
from tests.marked_processes import family, started
from tests.ports import free_port
from tests.waiting import eventually

ANSWERING_S = 5.0
WAIT_S = 60.0
LOOKS_S = 25.0
"""Longer than the runner looks before it takes its application for lost."""

GCS = "--gcs-address="

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Other:
    """What somebody else serves."""

    def __call__(self) -> str:
        return "here"


other = Other.bind()  # type: ignore[attr-defined]


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Model:
    """Takes a while to answer."""

    async def __call__(self) -> str:
        await asyncio.sleep(ANSWERING_S)
        return "answered"


@serve.deployment(name=GATEWAY_DEPLOYMENT, ray_actor_options={"num_cpus": 0})
class Gateway:
    """Asks the first of its models, as far as the runner looks at it."""

    def __init__(self, *models: DeploymentHandle[Any]) -> None:
        self._model, *_ = models
        self._num_answering = 0

    async def __call__(self) -> Any:
        self._num_answering += 1
        try:
            return await self._model.remote()
        finally:
            self._num_answering -= 1

    async def close(self) -> None:
        """It takes what comes."""

    async def num_answering(self) -> int:
        return self._num_answering


never = Model.options(name="never", ray_actor_options={"resources": {"nowhere": 1}}).bind()
half_loaded = Gateway.bind(Model.bind(), never)
unloaded = Gateway.bind(never)


RUNNER = "from deployments.runner import main; main()"

GUARDED = """
import sys
from ray.cluster_utils import Cluster
from tests.clusters import patiently
node = {"num_cpus": 0, "include_dashboard": False}
cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=node))
try:
    print("address", cluster.address, flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
"""
"""A cluster that asks for a token, until standard input ends."""


@pytest.fixture
def guarded_address() -> Iterator[str]:
    """Of a cluster that asks for a token."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "k" * 40}
    started = subprocess.Popen(
        [sys.executable, "-c", GUARDED],
        env={**os.environ, **token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with started:
        assert started.stdout is not None
        words = (line.split() for line in started.stdout)
        yield next(found[1] for found in words if found[:1] == ["address"])
        started.communicate()


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("deployments.runner", ["{path}", "{address}", "1"]),
        ("hdserve.cli", ["database", "stop", "--address", "{address}"]),
    ],
)
def test_a_cluster_that_asks_for_a_token(
    module: str, arguments: list[str], guarded_address: str, tmp_path: Path
) -> None:
    """It is there, though Ray does not say so; what lets one in is said."""
    path = tmp_path / "serve.json"
    path.write_text(json.dumps({"applications": []}))
    words = [word.format(path=path, address=guarded_address) for word in arguments]
    ended = subprocess.run(
        [sys.executable, "-c", f"from {module} import main; main()", *words],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stderr=subprocess.PIPE,
        timeout=START_TIMEOUT_S,
        text=True,
        check=False,
    )
    *_, last = ended.stderr.splitlines()
    assert ended.returncode in (1, 2)
    assert last.startswith(f"hdserve: no Ray cluster is reached at {guarded_address}: ")
    assert "; if it asks for a token: export RAY_AUTH_MODE=token" in last


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One on which others have started Ray Serve."""
    with connected_cluster(2) as found:
        serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
        try:
            yield found
        finally:
            serve.shutdown()


def run_unbuildable(
    directory: Path, cluster: Cluster, http_options: Mapping[str, Any] | None = None
) -> str:
    """What the runner says of an application that cannot be built."""
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {"config": str(directory / "nothing.yaml")},
    }
    path = directory / "serve.json"
    deployed = {"http_options": http_options or {}, "applications": [application]}
    path.write_text(json.dumps(deployed))
    ended = subprocess.run(
        [sys.executable, "-c", RUNNER, str(path), cluster.address, "1"],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        stderr=subprocess.PIPE,
        timeout=START_TIMEOUT_S,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    return ended.stderr


def test_what_others_serve_stays(tmp_path: Path, cluster: Cluster) -> None:
    """Where the application cannot be built, which is taken away."""
    serve.run(other, name="other", route_prefix="/other")
    assert "nothing.yaml: No such file" in run_unbuildable(tmp_path, cluster)
    applications = serve.status().applications
    assert {name: found.status for name, found in applications.items()} == {
        "other": ApplicationStatus.RUNNING
    }
    assert serve.get_app_handle("other").remote().result() == "here"


def test_nothing_is_replaced(tmp_path: Path, cluster: Cluster) -> None:
    """Neither what was deployed by another file nor what has the same name, or answers at the same
    place; that is said."""
    application = {"name": "filed", "import_path": f"{__name__}:other", "route_prefix": "/filed"}
    _client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    assert "serves 'filed' already" in run_unbuildable(tmp_path, cluster)
    serve.delete("filed")
    serve.run(other, name=APPLICATION)
    assert f"serves '{APPLICATION}' already" in run_unbuildable(tmp_path, cluster)
    assert serve.get_app_handle(APPLICATION).remote().result() == "here"
    serve.delete(APPLICATION)
    serve.run(other, name="default")  # as `serve run` calls it
    assert "serves 'default' at / already" in run_unbuildable(tmp_path, cluster)
    assert set(serve.status().applications) == {"default"}


def test_where_others_have_it_listen(tmp_path: Path, cluster: Cluster) -> None:
    """Nobody is answered elsewhere, nor at every interface unknown to the user; what leaves the
    port out is answered there."""
    port, other_port = _client().http_config.port, free_port()
    for host, wanted_port in (("127.0.0.1", other_port), ("0.0.0.0", port)):
        told = run_unbuildable(tmp_path, cluster, {"host": host, "port": wanted_port})
        assert (
            f"listens on 127.0.0.1, port {port}, already, and not on {host}, port {wanted_port}: "
            f"give --host 127.0.0.1 --port {port}"
        ) in told
    assert "nothing.yaml: No such file" in run_unbuildable(tmp_path, cluster, {"host": "127.0.0.1"})


def test_it_says_where_it_answers(tmp_path: Path, cluster: Cluster) -> None:
    """Which is where others have Ray Serve listen."""
    application = {"name": APPLICATION, "import_path": f"{__name__}:other", "route_prefix": "/"}
    path, log = tmp_path / "serve.json", tmp_path / "log"
    path.write_text(json.dumps({"applications": [application]}))
    place = f"http://127.0.0.1:{_client().http_config.port}"
    with started(log, "-c", RUNNER, str(path), cluster.address, "1") as (process, _):
        said = f"hdserve is ready at {place}\n"
        eventually(lambda: said in log.read_text(), START_TIMEOUT_S, pause_s=0.5)
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_S)


@pytest.mark.parametrize("command", ["delete", "deploy", "shutdown"])
def test_it_ends_where_others_have_taken_its_place(
    command: str, tmp_path: Path, cluster: Cluster
) -> None:
    """It would answer nobody for ever.  What they have deployed instead stays."""
    application = {"name": APPLICATION, "import_path": f"{__name__}:other", "route_prefix": "/"}
    path, log = tmp_path / "serve.json", tmp_path / "log"
    path.write_text(json.dumps({"applications": [application]}))
    with started(log, "-c", RUNNER, str(path), cluster.address, "1") as (process, _):
        eventually(lambda: "hdserve is ready" in log.read_text(), START_TIMEOUT_S, pause_s=0.5)
        if command == "deploy":
            changed = {**application, "runtime_env": {"env_vars": {"OTHER": "1"}}}
            _client().deploy_apps(ServeDeploySchema.model_validate({"applications": [changed]}))
        elif command == "delete":
            serve.delete(APPLICATION)
        else:
            serve.shutdown()
        assert process.wait(WAIT_S) == 1
    told = f"\nhdserve: the application '{APPLICATION}' of this server was deleted"
    assert told in log.read_text()
    assert (_application() is not None) == (command == "deploy")


def test_what_has_just_taken_its_place_stays(tmp_path: Path, cluster: Cluster) -> None:
    """Also where the server is interrupted before it has noticed."""
    application = {"name": APPLICATION, "import_path": f"{__name__}:other", "route_prefix": "/"}
    path, log = tmp_path / "serve.json", tmp_path / "log"
    path.write_text(json.dumps({"applications": [application]}))
    with started(log, "-c", RUNNER, str(path), cluster.address, "1") as (process, _):
        eventually(lambda: "hdserve is ready" in log.read_text(), START_TIMEOUT_S, pause_s=0.5)
        changed = {**application, "deployments": [{"name": "Other", "max_ongoing_requests": 7}]}
        _client().deploy_apps(ServeDeploySchema.model_validate({"applications": [changed]}))
        eventually(lambda: status_of_application() == ApplicationStatus.RUNNING, WAIT_S)
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_S)
    assert serve.get_app_handle(APPLICATION).remote().result() == "here"


REPLACE = """
import json, sys, ray
from deployments.runner import _client
from ray.serve.schema import ServeDeploySchema
ray.init(sys.argv[1], namespace="serve")
_client().deploy_apps(ServeDeploySchema.model_validate_json(sys.argv[2]))
"""


def test_what_replaces_it_on_its_own_cluster_is_served(tmp_path: Path) -> None:
    """With the cluster, it would end as well."""
    application = {"name": APPLICATION, "import_path": f"{__name__}:other", "route_prefix": "/"}
    port = free_port()
    path, log = tmp_path / "serve.json", tmp_path / "log"
    deployed = {"http_options": {"port": port}, "applications": [application]}
    path.write_text(json.dumps(deployed))
    with started(log, "-c", RUNNER, str(path), "local", "1") as (process, mark):
        eventually(lambda: "hdserve is ready" in log.read_text(), START_TIMEOUT_S, pause_s=0.5)
        changed = {**application, "deployments": [{"name": "Other", "max_ongoing_requests": 7}]}
        subprocess.run(
            [
                sys.executable,
                "-c",
                REPLACE,
                gcs_address(mark),
                json.dumps({"applications": [changed]}),
            ],
            env={**os.environ, "RAY_AUTH_MODE": "token"},
            timeout=WAIT_S,
            check=True,
        )
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(LOOKS_S)
        assert httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).text == "here"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0


def gcs_address(mark: str) -> str:
    """Of the cluster whose processes carry ``mark``."""
    words = (word for pid in family(mark) for word in words_of(pid))
    return next(word for word in words if word.startswith(GCS)).removeprefix(GCS)


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def status_of_application() -> ApplicationStatus:
    found = _application()
    assert found is not None
    return found.status


def deploy_until_there(application: str, *there: str) -> DeploymentHandle[Any]:
    """Deploy what will never be ready, until these of its deployments are."""
    path = f"{__name__}:{application}"
    deployed = {"name": APPLICATION, "import_path": path, "route_prefix": "/"}
    _client().deploy_apps(ServeDeploySchema.model_validate({"applications": [deployed]}))
    deadline_s = time.monotonic() + WAIT_S
    found: set[str] = set()
    while not found.issuperset(there):
        assert time.monotonic() < deadline_s, serve.status()
        time.sleep(0.1)
        deployments = serve.status().applications[APPLICATION].deployments.items()
        found = {name for name, each in deployments if each.replica_states.get("RUNNING")}
    assert serve.status().applications[APPLICATION].status == ApplicationStatus.DEPLOYING
    return serve.get_deployment_handle(GATEWAY_DEPLOYMENT, APPLICATION)


def test_what_a_model_answers_while_another_is_loaded_may_end(cluster: Cluster) -> None:
    gateway = deploy_until_there("half_loaded", "Model", GATEWAY_DEPLOYMENT)
    begun = gateway.remote()
    time.sleep(1.0)
    started_s = time.monotonic()
    _drain(WAIT_S)
    assert begun.result(timeout_s=0.1) == "answered"
    assert time.monotonic() - started_s > ANSWERING_S / 2
    assert _application() is None


def test_nobody_waits_for_an_answer_of_which_no_model_is_loaded(cluster: Cluster) -> None:
    gateway = deploy_until_there("unloaded", GATEWAY_DEPLOYMENT)
    gateway.remote()
    time.sleep(1.0)
    started_s = time.monotonic()
    _drain(WAIT_S)
    assert time.monotonic() - started_s < WAIT_S / 4

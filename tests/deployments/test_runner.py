"""What ``hdserve serve`` does to a cluster that others use, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from benchmarks.server import START_TIMEOUT_S
from deployments.runner import _client
from hdserve.config.deployed import APPLICATION, IMPORT_PATH
from tests.clusters import connected_cluster
from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Other:
    """What somebody else serves."""

    def __call__(self) -> str:
        return "here"


other = Other.bind()  # type: ignore[attr-defined]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One on which others have started Ray Serve."""
    with connected_cluster(2) as found:
        serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
        try:
            yield found
        finally:
            serve.shutdown()


def run_unbuildable(directory: Path, cluster: Cluster) -> str:
    """What the runner says of an application that cannot be built."""
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {"config": str(directory / "nothing.yaml")},
    }
    path = directory / "serve.json"
    path.write_text(json.dumps({"applications": [application]}))
    program = "from deployments.runner import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path), cluster.address, "1"],
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
    """Neither what was deployed by another file nor what has the same name; that is said."""
    application = {"name": "filed", "import_path": f"{__name__}:other", "route_prefix": "/filed"}
    _client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    assert "serves 'filed' already" in run_unbuildable(tmp_path, cluster)
    serve.delete("filed")
    serve.run(other, name=APPLICATION)
    assert f"serves '{APPLICATION}' already" in run_unbuildable(tmp_path, cluster)
    assert serve.get_app_handle(APPLICATION).remote().result() == "here"

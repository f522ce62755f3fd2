"""What gateways and replicas say is in the files of Ray Serve, which the documents name."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.application import AppArgs, app
from tests.clusters import connected_cluster
from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-tiny"
WAIT_S = 60.0


@pytest.fixture
def logs() -> Iterator[Path]:
    """The files of Ray Serve on a cluster that serves nothing yet, and has a GPU, which need not
    exist."""
    with connected_cluster(2, num_gpus=1) as cluster:
        try:
            yield Path(cluster.head_node.get_logs_dir_path()) / "serve"
        finally:
            serve.shutdown()


def line(logs: Path, deployment: str, text: str) -> dict[str, Any]:
    """The only line with ``text`` that a deployment's only replica has written, or writes."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        (path,) = logs.glob(f"replica_*{deployment}*.log")
        found = [line for line in path.read_text().splitlines() if text in line]
        if found:
            (only,) = map(json.loads, found)
            return dict(only)
        assert time.monotonic() < deadline_s, path.read_text()
        time.sleep(0.1)


def test_lines_are_in_the_files_of_ray_serve(logs: Path, tmp_path: Path) -> None:
    """As `logging_config` has them, with time and level, and those that are no warnings, too; the
    one that is tells of a GPU that is reserved in vain."""
    keys, port = tmp_path / "keys", free_port()
    keys.write_text("a-key-of-sixteen-characters tenant\n")
    engine = {"compile": False, "device": "cpu"}
    config = {
        "models": [
            {"name": MODEL, "model": MODEL, "num_cpus": 0.5, "num_gpus": 1, "engine": engine}
        ],
        "access": {"api_keys_file": str(keys)},
        "model_database": {"is_enabled": False},
    }
    serve.start(http_options={"port": port})
    serve.run(app(AppArgs(config=config)), logging_config={"encoding": "JSON"})
    keys.write_text("another-key-of-sixteen-characters tenant\n")
    headers = {"authorization": "Bearer nobody"}
    httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers, timeout=WAIT_S)
    for deployment, text, level in (
        (f"model-{MODEL}", f"{MODEL}: a GPU is reserved, but not used: ", "WARNING"),
        (f"model-{MODEL}", " on cpu, ", "INFO"),
        ("gateway", "the keys have changed; there are 1 API keys", "INFO"),
    ):
        found = line(logs, deployment, text)
        assert found["levelname"] == level
        assert found["asctime"]
        assert deployment in found["deployment"]

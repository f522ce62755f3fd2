"""A served application in processes of its own, for end-to-end tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai

START_TIMEOUT_S = 180.0


class ServedApplication:
    """``serve run`` in a subprocess on a free port, on a Ray of its own.

    Args:
        directory: for the log and the Serve configuration file.
        config: the hdserve configuration; ``None`` for the default application.  Models are not
            compiled unless it says so.
        ray_address: a running cluster to use; by default one is started with it.
        environment: further environment variables.
    """

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any] | None = None,
        ray_address: str = "local",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._clients: list[openai.OpenAI] = []
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log_path = directory / "serve.log"
        serve_config = directory / "serve.json"
        args = {} if config is None else {"config": _uncompiled(config)}
        serve_config.write_text(
            json.dumps(
                {
                    "http_options": {"host": "127.0.0.1", "port": self.port},
                    "applications": [
                        {
                            "name": "hdserve",
                            "route_prefix": "/",
                            "import_path": "deployments:app",
                            "args": args,
                        }
                    ],
                }
            )
        )
        serve = Path(sys.executable).with_name("serve")
        variables = {
            **os.environ,
            "RAY_ADDRESS": ray_address,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            **(environment or {}),
        }
        self._log = self.log_path.open("w")
        self._process = subprocess.Popen(
            [str(serve), "run", str(serve_config)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process all others descend from."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until every model answers."""
        wait_until_ready(self._process, self.base_url, self.log_path)

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """A client that does not retry."""
        client = openai.OpenAI(base_url=f"{self.base_url}/v1", api_key=api_key, max_retries=0)
        self._clients.append(client)
        return client

    def stop(self) -> None:
        """End it with every process it started."""
        for client in self._clients:
            client.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()


def _uncompiled(config: Mapping[str, Any]) -> dict[str, Any]:
    def uncompiled(model: Mapping[str, Any]) -> dict[str, Any]:
        engine = model.get("engine", {})
        return {**model, "engine": {**engine, "compile": engine.get("compile") is True}}

    return {**config, "models": [uncompiled(model) for model in config["models"]]}


def wait_until_ready(process: subprocess.Popen[Any], base_url: str, log_path: Path) -> None:
    """Wait until every model of the server that ``process`` runs answers."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log_path.read_text()[-3000:]
        try:
            if httpx.get(f"{base_url}/ready", timeout=10).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"not ready: {log_path.read_text()[-3000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

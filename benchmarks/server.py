"""A server in processes of its own, on this machine: for benchmarks and end-to-end tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

START_TIMEOUT_S = 600.0
"""Patience with a machine that does other things, too."""

_END_TIMEOUT_S = 60.0
_ENVIRONMENT = {
    "RAY_ADDRESS": "local",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


class Server:
    """A command that serves, on a Ray of its own, for as long as it is needed.

    As a context it waits until every model answers, and ends it with every process it started.

    Args:
        command: what serves on ``port``.
        log_path: what it prints.
        environment: further environment variables.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self._log = log_path.open("w")
        self.process = subprocess.Popen(
            list(command),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )

    @classmethod
    def hdserve(cls, directory: Path, config: Mapping[str, Any], port: int) -> Server:
        """Return a server that runs ``hdserve serve``; ``directory`` is for its log and
        configuration."""
        path = directory / "config.yaml"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-c", "from hdserve.cli import main; main()", "serve"]
        arguments = ["--config", str(path), "--port", str(port)]
        return cls([*command, *arguments], port, directory / "serve.log")

    @property
    def pid(self) -> int:
        """The process all others descend from."""
        return self.process.pid

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self) -> None:
        """Wait until every model answers."""
        wait_until_ready(self.process, self.base_url, self.log_path)

    def stop(self) -> None:
        """End it with every process it started."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._log.close()


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

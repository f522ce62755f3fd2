"""``hdserve serve``: Ray Serve's own runner with this application."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from hdserve.config import load_config
from hdserve.errors import ConfigError


def serve(
    config: Annotated[
        Path | None, typer.Option(help="The configuration; default: HDSERVE_CONFIG.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0 is every interface.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen.", min=1, max=65535)] = 8000,
) -> None:
    """Serve the models of a configuration until Ctrl-C, by default the bundled ones.

    Runs `serve run` of Ray Serve on the Ray cluster RAY_ADDRESS names, or on one that is started
    with it and ends with it.
    """
    load_config(config)  # a wrong one is told here, before anything starts
    runner = Path(sys.executable).with_name("serve")
    if not runner.exists():
        raise ConfigError(f"{runner} is missing; install Ray Serve: pip install 'ray[serve]'")
    application = {
        "name": "hdserve",
        "route_prefix": "/",
        "import_path": "deployments:app",
        "args": {} if config is None else {"config": str(config.absolute())},
    }
    deploy = {"http_options": {"host": host, "port": port}, "applications": [application]}
    with tempfile.TemporaryDirectory(prefix="hdserve-") as directory:
        path = Path(directory) / "serve.json"
        path.write_text(json.dumps(deploy), encoding="utf-8")
        status = _run([str(runner), "run", str(path)])
    raise typer.Exit(status)


def _run(command: list[str]) -> int:
    """Run a command to its end; what ends this process ends it, too.

    Ray by itself would join, and deploy to, any cluster it finds on this machine.
    """
    process = subprocess.Popen(command, env={"RAY_ADDRESS": "local", **os.environ})

    def pass_on(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    def let_it_end(_number: int, _frame: Any) -> None:
        """Ctrl-C reaches the whole process group."""

    old = {signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on)}
    old[signal.SIGINT] = signal.signal(signal.SIGINT, let_it_end)
    try:
        return process.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)

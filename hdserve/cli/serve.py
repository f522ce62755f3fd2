"""``hdserve serve``: Ray Serve's own runner with this application."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Annotated

import typer

from hdserve.config import load_config
from hdserve.errors import ConfigError

END_TIMEOUT_S = 7.0
"""Ray Serve ends in 3 to 6 s; then nothing is waited for any more."""

_POLL_S = 0.1
_READY_POLL_S = 0.5
_READY_TIMEOUT_S = 30.0
_LOCAL_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where to ask for what listens everywhere."""


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
    with it and ends with it; says when the models answer.
    """
    load_config(config)  # a wrong one is told here, before anything starts
    if "RAY_ADDRESS" not in os.environ:
        check_is_free(host, port)
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
        threading.Thread(target=announce, args=(url_of(host, port),), daemon=True).start()
        status = run_until_signal([str(runner), "run", str(path)])
    raise typer.Exit(status)


def check_is_free(host: str, port: int) -> None:
    """Ray Serve would start everything and then not listen.

    Raises:
        ConfigError: another program listens there, or ``host`` is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from error


def url_of(host: str, port: int) -> str:
    """Where to ask for what listens at ``host``."""
    found = _LOCAL_HOSTS.get(host, host)
    return f"http://[{found}]:{port}" if ":" in found else f"http://{found}:{port}"


def announce(base_url: str) -> None:
    """Wait until the models answer, past any proxy, and say so."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        with (
            contextlib.suppress(OSError, ValueError),
            direct.open(f"{base_url}/ready", timeout=_READY_TIMEOUT_S),
        ):
            break
        time.sleep(_READY_POLL_S)
    typer.echo(f"hdserve is ready at {base_url}")


def run_until_signal(command: list[str]) -> int:
    """Run a command to its end; the first signal that is to end this process ends it, too.

    Ray by itself would join, and deploy to, any cluster it finds on this machine, so it is told to
    start one unless the environment names another.

    It has a session of its own, so that Ctrl-C reaches it once, and not its children behind its
    back.  What is still there ``END_TIMEOUT_S`` after the signal is killed.
    """
    signals: SimpleQueue[int] = SimpleQueue()

    def note(number: int, _frame: FrameType | None) -> None:
        signals.put(number)

    old = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    process = subprocess.Popen(
        command, env={"RAY_ADDRESS": "local", **os.environ}, start_new_session=True
    )
    try:
        while process.poll() is None and signals.empty():
            time.sleep(_POLL_S)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # what Ray Serve shuts its application down on
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT_S)
    finally:
        _kill(process.pid)
        status = process.wait()
        for number, handler in old.items():
            signal.signal(number, handler)
    return status if signals.empty() else 128 + signals.get()


def _kill(session: int) -> None:
    """End whatever is left of a session that this process began."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)

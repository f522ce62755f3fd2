"""Whether a port of this machine is free, and reserving it until a server listens there."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack

_MAX_NAME_BYTES = 100


def listening_error(host: str, port: int) -> OSError | None:
    """Return why nobody can start to listen there, or ``None`` if it is possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:  # also where the machine has no IPv6
        return error
    return None


def reservation_error(host: str, port: int, holding: ExitStack) -> OSError | None:
    """Return why nobody can start to listen there, or reserve the port until ``holding`` is closed:
    a server that starts reserves its ports for the half minute until it listens.

    An abstract socket name stands for the port, on Linux only.  It is not a file: all users who
    share the ports share it, and it ends with this process.
    """
    error = listening_error(host, port)
    if error or sys.platform != "linux":
        return error
    name = f"\0hdserve-port-{port}-{host}".encode()[:_MAX_NAME_BYTES]
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(name)
    except OSError as taken:
        claim.close()
        return taken
    holding.enter_context(claim)
    return None

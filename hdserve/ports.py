"""Whether somebody can listen at a port of this machine, and keeping it until they do."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack

_MAX_NAME_BYTES = 100


def listening_error(host: str, port: int) -> OSError | None:
    """Say why nobody can begin to listen there, or give ``None`` where one can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def reservation_error(host: str, port: int, holding: ExitStack) -> OSError | None:
    """Say why nobody can begin to listen there, or have nobody else reserve the port until
    ``holding`` is closed: who starts a server reserves its ports for the half minute in which
    nothing listens yet.

    A name of a socket stands for the port, on Linux alone.  It is no file: it is the same for all
    users who share the ports, and ends with this process.
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

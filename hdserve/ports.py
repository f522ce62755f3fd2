"""Whether somebody can listen at a port of this machine."""

from __future__ import annotations

import socket


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

"""Whether anybody is at the address of a Ray cluster, where Ray itself would try for minutes."""

from __future__ import annotations

import socket

TOKEN_HINT = (
    "if it asks for a token: export RAY_AUTH_MODE=token, with its token in ~/.ray/auth_token"
)
"""What may help where somebody listens and Ray does not get in: it does not say what it was refused
for."""

_CONNECT_TIMEOUT_S = 3.0
_FOUND_BY_RAY = ("auto", "local")


def host_and_port(address: str) -> tuple[str, int] | None:
    """``None`` where it is another form, as of what Ray finds by itself."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


def why_unanswered(address: str) -> str:
    """Why nobody answers there; empty where somebody does, or Ray finds it by itself."""
    place = host_and_port(address)
    if place is None:
        is_known = address in _FOUND_BY_RAY or "://" in address
        return "" if is_known else "HOST:PORT is expected"
    try:
        socket.create_connection(place, _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return ""

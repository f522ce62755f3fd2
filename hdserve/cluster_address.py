"""Whether something listens at the address of a Ray cluster; Ray itself would try for minutes."""

from __future__ import annotations

import socket

TOKEN_HINT = (
    "if it asks for a token: export RAY_AUTH_MODE=token, with its token in ~/.ray/auth_token"
)
"""A hint for when something listens but Ray is refused: it does not say why it was
refused."""

_CONNECT_TIMEOUT_S = 3.0
_FOUND_BY_RAY = ("auto", "local")


def host_and_port(address: str) -> tuple[str, int] | None:
    """``None`` if it has another form, such as those that Ray resolves itself."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


def why_unanswered(address: str) -> str:
    """Why nothing answers there; empty if something does, or if Ray resolves the address itself."""
    place = host_and_port(address)
    if place is None:
        is_known = address in _FOUND_BY_RAY or "://" in address
        return "" if is_known else "HOST:PORT is expected"
    try:
        socket.create_connection(place, _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return ""

"""What a cluster that ``hdserve serve`` starts needs in its environment where Ray would not start
by itself."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_MODE = "RAY_AUTH_MODE"
_WITH_TOKEN = "token"

_RAY_PLACE = "RAY_TMPDIR"
_PLACE = "TMPDIR"
SHORT_PLACE = "/tmp"
MAX_SOCKET_PATH_BYTES = 107
_LONGEST_NAME_BYTES = len(
    "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/dash_MetricsHead"
)


def token_variables(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that name a new token where Ray, which asks for one unless ``environment``
    says otherwise, would find and could make none in the home directory.

    Args:
        directory: accessible to this user only, for the token.
    """
    is_asked_for = environment.get(_MODE, _WITH_TOKEN).lower() == _WITH_TOKEN
    is_named = environment.get(_TOKEN) or environment.get(_TOKEN_PATH)
    if not is_asked_for or is_named or _keeps_token(environment.get("HOME")):
        return {}
    path = directory / "auth_token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return {_TOKEN_PATH: str(path)}


def directory_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that has Ray put its files below ``/tmp``, as it does by default, if the
    paths of its sockets would be too long where ``environment`` has temporary files."""
    longest = len(os.fsencode(environment.get(_PLACE, ""))) + _LONGEST_NAME_BYTES
    if _RAY_PLACE in environment or longest <= MAX_SOCKET_PATH_BYTES:
        return {}
    return {_RAY_PLACE: SHORT_PLACE}


def _keeps_token(home: str | None) -> bool:
    """Whether Ray has a token below ``home``, or can make one.  Without a home its parts would look
    for it in different directories."""
    if not home:
        return False
    token = Path(home, ".ray", "auth_token")
    try:
        token.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    if os.path.exists(token):
        return os.access(token, os.R_OK)
    return os.access(token.parent, os.W_OK | os.X_OK)

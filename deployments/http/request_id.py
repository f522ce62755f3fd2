"""Ids of requests: the sender's, or one made by Ray Serve's proxy."""

from __future__ import annotations

from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import Scope

_HEADER = "x-request-id"
_MAX_CHARACTERS = 64
_ESCAPED = {code: f"\\x{code:x}" for code in range(0x80, 0xA0)}
"""Control characters beyond ASCII; HTTP servers refuse the ASCII ones."""


def sent_id(scope: Scope) -> str | None:
    """Return the id sent with a request; control characters, and bytes that are not UTF-8, are
    escaped."""
    sent = Headers(scope=scope).get(_HEADER, "").encode("latin-1")
    return sent.decode(errors="backslashreplace").translate(_ESCAPED) or None


def request_id(scope: Scope) -> str:
    """Return the id sent with a request, shortened if it is long, or a new one."""
    return (sent_id(scope) or uuid4().hex)[:_MAX_CHARACTERS]


def anthropic_headers(scope: Scope) -> dict[str, str]:
    """Return the header that gives Anthropic's clients what ``x-request-id`` gives OpenAI's."""
    sent = sent_id(scope)
    return {"request-id": sent.encode().decode("latin-1")} if sent else {}

"""Ids of requests: the sender's, or one that Ray Serve's proxy made up."""

from __future__ import annotations

from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import Scope

_HEADER = "x-request-id"
_MAX_CHARACTERS = 64


def sent_id(scope: Scope) -> str | None:
    """Return the id that a request came with; bytes that are no UTF-8 are escaped."""
    sent = Headers(scope=scope).get(_HEADER, "").encode("latin-1")
    return sent.decode(errors="backslashreplace") or None


def request_id(scope: Scope) -> str:
    """Return the beginning of the id that a request came with, or a new one."""
    return (sent_id(scope) or uuid4().hex)[:_MAX_CHARACTERS]


def anthropic_headers(scope: Scope) -> dict[str, str]:
    """Return the header that tells Anthropic's clients what ``x-request-id`` tells OpenAI's."""
    sent = Headers(scope=scope).get(_HEADER)
    return {"request-id": sent} if sent else {}

"""Ids of requests: the sender's, or one that Ray Serve's proxy made up."""

from __future__ import annotations

from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import Scope

_HEADER = "x-request-id"
_MAX_CHARACTERS = 64


def request_id(scope: Scope) -> str:
    """Return the id of a request, or a new one; bytes that are no UTF-8 are escaped."""
    sent = Headers(scope=scope).get(_HEADER, "").encode("latin-1")
    return sent.decode(errors="backslashreplace")[:_MAX_CHARACTERS] or uuid4().hex


def anthropic_headers(scope: Scope) -> dict[str, str]:
    """Return the header that tells Anthropic's clients what ``x-request-id`` tells OpenAI's."""
    sent = Headers(scope=scope).get(_HEADER)
    return {"request-id": sent} if sent else {}

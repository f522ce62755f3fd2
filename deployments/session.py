"""Which conversation a request belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from deployments.generation import GenerationRequest

SESSION_HEADER = "x-session-id"
_MAX_HEADER_CHARACTERS = 256


def session_id(header: str, generation: GenerationRequest) -> str:
    """Return the client's name of its conversation, else a hash of the messages that all its turns
    begin with: those up to the first one of the user.  It is empty if there is
    neither."""
    if header:
        return header[:_MAX_HEADER_CHARACTERS]
    if not generation.messages:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for role, content in _opening(generation.messages):
        digest.update(f"{len(role)} {len(content)} {role}{content}".encode())
    return digest.hexdigest()


def _opening(messages: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    for message in messages:
        yield message["role"], message["content"]
        if message["role"] == "user":
            return

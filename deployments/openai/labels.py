"""What clients write on requests for themselves: parameters that change no answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdserve.errors import InvalidRequest

MAX_METADATA = 1024
"""The most members; the OpenAI API has 16."""

MAX_KEY_CHARACTERS = 64
MAX_VALUE_CHARACTERS = 512
"""Of a member of the metadata, as in the OpenAI API."""

MAX_LABEL_CHARACTERS = 1024
"""Of any other label; the OpenAI API has 64."""

_LABELS = ("user", "safety_identifier", "prompt_cache_key")


def check_labels(body: Mapping[str, Any]) -> None:
    """
    Raises:
        InvalidRequest: a label is too long, or there are too many; answers repeat some of them,
            several times if they are streams.
    """
    for name in _LABELS:
        if _is_longer(body.get(name), MAX_LABEL_CHARACTERS):
            reason = f"a string of at most {MAX_LABEL_CHARACTERS} characters is expected"
            raise InvalidRequest(f"{name}: {reason}", name)
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping):
        _check_metadata(metadata)


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    wanted = {
        f"an object of at most {MAX_METADATA} members is": len(metadata) > MAX_METADATA,
        f"names of at most {MAX_KEY_CHARACTERS} characters are": any(
            _is_longer(name, MAX_KEY_CHARACTERS) for name in metadata
        ),
        f"values of at most {MAX_VALUE_CHARACTERS} characters are": any(
            _is_longer(value, MAX_VALUE_CHARACTERS) for value in metadata.values()
        ),
    }
    for kind, is_missed in wanted.items():
        if is_missed:
            raise InvalidRequest(f"metadata: {kind} expected", "metadata")


def _is_longer(value: Any, number: int) -> bool:
    return isinstance(value, str) and len(value) > number

"""How long a context of a model may be, as its ``config.json`` has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_COUPLING_TYPES = {"dynamic", "longrope"}


def longest_context(max_positions: int, rotary: Mapping[str, Any]) -> int:
    """Return the context length in tokens, limited to where rotary embeddings treat sequences
    independently.

    ``yarn`` stretches the original context by its factor, whatever the length of a forward.
    ``dynamic`` and ``longrope`` embeddings pick their frequencies by the longest position of a
    forward, so beyond the original context one sequence would change another's output.

    Args:
        max_positions: the configuration's ``max_position_embeddings``.
        rotary: its ``rope_parameters``, or ``rope_scaling``.
    """
    limit = max_positions
    for rope in _sets(rotary):
        original = int(rope.get("original_max_position_embeddings") or max_positions)
        kind = rope.get("rope_type", rope.get("type"))
        if kind in _COUPLING_TYPES:
            limit = min(limit, original)
        elif kind == "yarn":
            limit = max(limit, int(float(rope.get("factor") or 1.0) * original))
    return limit


def written_context(config: Mapping[str, Any]) -> int:
    """Return the context length that the content of a ``config.json`` gives, which may be of an
    older form than what transformers makes of it.

    Raises:
        AttributeError, KeyError, OverflowError, TypeError, ValueError: it gives none.
    """
    text = config.get("text_config", config)
    rotary = text.get("rope_scaling") or text.get("rope_parameters") or {}
    original = text.get("original_max_position_embeddings")
    if original is not None:
        rotary = {**rotary, "original_max_position_embeddings": original}
    return longest_context(int(text["max_position_embeddings"]), rotary)


def _sets(rotary: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield every set of rotary parameters; models with several kinds of layers nest them."""
    if "rope_type" in rotary or "type" in rotary:
        yield rotary
    else:
        yield from (value for value in rotary.values() if isinstance(value, Mapping))

"""The tokens of texts that may be far longer than a model's context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hdserve.engine.tokenizer import Tokenizer

_NUM_CHARACTERS_PER_TOKEN = 8
"""Texts with as many are rare: what has no more is read whole."""

_GROWTH = 4
_MAX_CHANGED_TOKENS = 256
"""The most tokens before a cut that are others where the text goes on: at most a few words, or one
token that was to be cut in two."""


class TextBeginning(NamedTuple):
    """The token ids a text begins with, and whether they are all it has."""

    token_ids: Sequence[int]
    is_whole: bool


def encode_beginning(
    tokenizer: Tokenizer, text: str, num_tokens: int, *, adds_special_tokens: bool = True
) -> TextBeginning:
    """The token ids of ``text``; of one that has far more than ``num_tokens``, more than as many,
    and no work for the others.  To make the tokens of 1 MB takes seconds.

    Raises:
        InvalidRequest: it has half of a surrogate pair, which is no text.
    """
    for beginning in _beginnings(tokenizer, text, num_tokens):
        found = tokenizer.encode(beginning, adds_special_tokens=adds_special_tokens)
        if len(found) - _MAX_CHANGED_TOKENS > num_tokens + num_tokens // 4:
            return TextBeginning(found[:-_MAX_CHANGED_TOKENS], is_whole=False)
    found = tokenizer.encode(text, adds_special_tokens=adds_special_tokens)
    return TextBeginning(found, is_whole=True)


def _beginnings(tokenizer: Tokenizer, text: str, num_tokens: int) -> Iterator[str]:
    """Longer and longer ones; none of a text that is read whole.

    Where there are tokens that take in the white space before them, however much of it there is,
    it is left out of a beginning that ends in some, if text follows.
    """
    num_characters = num_tokens * _NUM_CHARACTERS_PER_TOKEN
    if num_characters >= len(text):
        return
    added = tokenizer.backend.get_added_tokens_decoder().values()
    end_of_text = len(text.rstrip()) if any(token.lstrip for token in added) else 0
    while num_characters < len(text):
        beginning = text[:num_characters]
        yield beginning if num_characters >= end_of_text else beginning.rstrip()
        num_characters *= _GROWTH

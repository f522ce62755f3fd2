"""The tokens of texts that may be far longer than a model's context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hdserve.engine.tokenization.tokenizer import Tokenizer

_NUM_CHARACTERS_PER_TOKEN = 8
"""Texts of up to this many characters per wanted token are read whole; few have more a token."""

_GROWTH = 4
_MAX_CHANGED_TOKENS = 256
"""How many tokens before a cut may differ from those of the whole text: at most a few words, or one
token that was cut in two."""


class TextBeginning(NamedTuple):
    """The first token ids of a text, and whether they are all of it."""

    token_ids: Sequence[int]
    is_whole: bool


def encode_beginning(
    tokenizer: Tokenizer, text: str, num_tokens: int, *, adds_special_tokens: bool = True
) -> TextBeginning:
    """The token ids of ``text``, or, if it has far more than ``num_tokens``, only its first ones,
    but more than that number, without work for the rest: tokenizing 1 MB takes seconds.

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
    """Longer and longer beginnings of the text; none if it is read whole.

    If the vocabulary has tokens that absorb any amount of white space before them, white space at
    the end of a beginning is left out, unless the text ends there.
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

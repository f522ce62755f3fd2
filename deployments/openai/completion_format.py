"""Completions as the OpenAI API has them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deployments.generation import Alternative, Delta, TokenInfo
from deployments.openai.answer import Answer
from deployments.openai.long_list import LongList, PackedTokens
from deployments.openai.prompt_logprobs import shown_prompt

_new_decoder = codecs.getincrementaldecoder("utf-8")


class CompletionFormat:
    """Makes ``text_completion`` objects and chunks.

    Args:
        echoes: per prompt the text that comes before the answer; empty without ``echo``.
        num_logprobs: how many of the likeliest tokens each token has beside itself at most.
        num_prompt_logprobs: how many of them a choice of a whole answer shows at each place of its
            prompt; ``None`` shows nothing of it.
        shows_token_ids: whether choices have the ids of their tokens, and those of their prompt
            where they begin.
    """

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        echoes: tuple[str, ...] = (),
        *,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        shows_token_ids: bool = False,
    ) -> None:
        self._echoes = echoes
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._shows_token_ids = shows_token_ids
        self._num_characters: dict[int, int] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._num_spaces: dict[int, int] = {}
        """How many characters a space before the text of a choice was taken for, until it came."""

    def opening(self, first: Mapping[str, Any], num_choices: int) -> list[dict[str, Any]]:
        """Return nothing, since texts have no roles."""
        return []

    def deltas(self, delta: Delta, index: int, *, is_first: bool) -> list[dict[str, Any]]:
        """Return the ``choices`` entry of a delta's chunk."""
        text = (self._echo(delta.prompt_index) if is_first else "") + delta.text
        entry: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(delta, index),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            entry["stop_reason"] = delta.stop_reason
        if self._shows_token_ids:
            entry["token_ids"] = list(delta.token_ids)
            if is_first:
                entry["prompt_token_ids"] = list(delta.prompt_token_ids)
        return [entry]

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        """Return the ``choices`` entry of a whole answer."""
        found: dict[str, Any] = {
            "index": index,
            "text": self._echo(answer.prompt_index) + answer.text,
            "logprobs": self._logprobs(answer, index),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self._num_prompt_logprobs is not None:
            prompt = shown_prompt(answer.prompt_logprobs, self._num_prompt_logprobs)
            found["prompt_logprobs"] = prompt
        if self._shows_token_ids:
            found["token_ids"] = answer.token_ids
            found["prompt_token_ids"] = list(answer.prompt_token_ids)
        return found

    def beside_delta(self, delta: Delta) -> dict[str, Any]:
        """Return nothing, since each choice has its own prompt."""
        return {}

    def beside_choices(self, answers: Mapping[int, Answer]) -> dict[str, Any]:
        """Return nothing, since each choice has its own prompt."""
        return {}

    def _echo(self, prompt_index: int) -> str:
        return self._echoes[prompt_index] if self._echoes else ""

    def _logprobs(self, part: Delta | Answer, index: int) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        echo = self._echo(part.prompt_index)
        prompt = part.prompt_logprobs if self._echoes else ()
        offsets = _offsets_in_echo(echo, prompt)
        start = self._num_characters.get(index, len(echo))
        if part.text and index in self._num_spaces:
            start += part.text.startswith(" ") - self._num_spaces.pop(index)
        for token in part.logprobs:
            offsets.append(start)
            if not token.is_skipped:
                is_first = start == len(echo) and index not in self._num_spaces
                beginning = part.text if is_first else None
                start += self._length(token.data, index, beginning)
        self._num_characters[index] = start
        tokens: Sequence[TokenInfo]
        if isinstance(part, Delta):
            tokens = [*prompt, *part.logprobs]
            top: Sequence[Any] = [*map(self._top, tokens)]
        else:
            tokens = PackedTokens(prompt)
            tokens.add(part.logprobs)
            top = LongList(tokens, self._top)
        return {
            "tokens": [_distinct_text(token.data) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _length(self, token: bytes, index: int, beginning: str | None) -> int:
        """How many characters of an answer a token completes.

        Args:
            beginning: of the answer, before which many decoders drop a space; ``None`` further on.
                While it is empty, a token that is a space is taken for one that was dropped, and
                any other for text that is held back.
        """
        text = self._decoders.setdefault(index, _new_decoder("replace")).decode(token)
        if beginning is None or not text.startswith(" "):
            return len(text)
        num_spaces = int(beginning.startswith(" ") if beginning else token != b" ")
        if not beginning:
            self._num_spaces[index] = num_spaces
        return len(text) - 1 + num_spaces

    def _top(self, token: TokenInfo) -> dict[str, float] | None:
        """Return log probabilities by text: as many of the likeliest as were asked for, and that of
        the token itself."""
        if token.logprob is None:
            return None
        own = Alternative(token.data, token.logprob, token.token_id)
        return _by_text((*token.top[: self._num_logprobs], own))


def _offsets_in_echo(echo: str, tokens: Iterable[TokenInfo]) -> list[int]:
    """Return where each token of a prompt begins in its text."""
    decoder = _new_decoder("replace")
    offsets, end = list[int](), 0
    for token in tokens:
        offsets.append(end)
        end += _length_in_echo(echo, end, decoder.decode(token.data))
    return offsets


def _length_in_echo(echo: str, start: int, token: str) -> int:
    """Return how many characters of the text a token of a prompt is.  What tokenizers put before a
    text, a special token or a space, takes no place in it."""
    if echo.startswith(token, start) or start > 0:
        return len(token)
    begun = token.removeprefix(" ")
    return len(begun) if echo.startswith(begun) else 0


def _by_text(top: Iterable[Alternative]) -> dict[str, float]:
    """Return log probabilities by text; of two tokens with the same text the likelier one stays."""
    found: dict[str, float] = {}
    for token in top:
        found.setdefault(_distinct_text(token.data), token.logprob)
    return found


def _distinct_text(data: bytes) -> str:
    """Return the text of a token; parts of characters as the OpenAI API writes them, so that two of
    them stay two keys."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

"""The log probabilities of a response: those of the tokens of its messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from typing import Any

from deployments.generation import TokenInfo

_MAX_KEPT = 64
"""How many of the last tokens may be text after what is none and was not found: a parser holds back
what may begin a mark."""

_MAX_SEARCHED = 4096
"""How many tokens are kept where something was not found among them: calls that come at once, after
they were buffered and in other words, would each be searched for in all of them."""


class TextTokens:
    """Finds the tokens of the pieces of text among all tokens of an answer, which also has
    reasoning, calls, and the marks of both.

    A piece of text behind another one begins where that has ended.  One behind something else comes
    after it and a mark, as a rule at the beginning of a token::

        Two and two. </think> Four, <tool_call>{"name": ... }</tool_call> Done
                              ^ text                                      ^ text
    """

    def __init__(self) -> None:
        self._tokens: deque[TokenInfo] = deque()
        self._data = bytearray()
        """What the tokens stand for, without what is taken of the first one."""

        self._num_taken = 0
        """How many bytes of the first token are taken."""

        self._num_new = 0
        """How many tokens were added last."""

        self._goes_on = True
        """Whether there was nothing but text."""

        self._has_unknown = False
        """Whether what was passed over last was not found, so that its tokens are left."""

    def add(self, tokens: Iterable[TokenInfo]) -> None:
        """Take tokens that the model wrote; the text leaves out those that are skipped."""
        kept = [token for token in tokens if not token.is_skipped]
        if kept and self._has_unknown:
            self._forget(_MAX_KEPT)
            self._has_unknown = False
        self._num_new = len(kept) or self._num_new
        self._tokens += kept
        for token in kept:
            self._data += token.data

    def pass_over(self, part: str) -> None:
        """Note that what comes next in the answer is no text, but this, as it is written or in
        other words."""
        self._goes_on = False
        for data in filter(None, self._written(part)):
            start = self._data.find(data)
            self._has_unknown = start < 0
            end = 0 if start < 0 else start + len(data)
            self._taken(end, end)
        if self._has_unknown and len(self._tokens) > _MAX_SEARCHED:
            self._forget(self._num_new + _MAX_KEPT)

    def take(self, text: str) -> list[TokenInfo]:
        """Return the tokens of which the next piece is the first to have any byte; where its bytes
        are not to be found, as of broken characters, all that are left."""
        found = []
        for data in filter(None, self._written(text)):
            start = self._place(data)
            end = len(self._data) if start < 0 else start + len(data)
            found += self._taken(max(start, 0), end)
            self._goes_on, self._has_unknown = True, False
        return found

    def _written(self, text: str) -> Iterator[bytes]:
        """Yield what to look for, each behind the last: a piece, or, if it is not to be found, its
        lines, since parsers put line breaks in the places of marks between two messages."""
        whole = text.encode()
        if whole in self._data:
            yield whole
            return
        first, *others = whole.split(b"\n")
        yield first
        for line in others:
            if b"\n" + line in self._data:
                yield b"\n" + line
            else:
                self._goes_on = False
                yield line

    def _place(self, data: bytes) -> int:
        """Return where a piece of text begins; -1 if it is not to be found.  A mark may begin like
        it, or have it within, but does not end with it."""
        first = self._data.find(data)
        if self._goes_on and first >= 0 and not self._data[:first].strip():
            return first
        sizes = (len(token.data) for token in self._tokens)
        bounds = [*accumulate(sizes, initial=-self._num_taken)]
        starts = [each for each in bounds if each >= 0 and self._data.startswith(data, each)]
        whole = [each for each in starts if each + len(data) in bounds]
        return next(chain(whole, starts), first if self._goes_on else self._data.rfind(data))

    def _taken(self, start: int, end: int) -> list[TokenInfo]:
        """Take what is before ``end``, and return the tokens that reach beyond ``start``."""
        del self._data[:end]
        place, self._num_taken = -self._num_taken, 0
        found = []
        while self._tokens and place < end:
            token = self._tokens[0]
            next_place = place + len(token.data)
            if next_place > start and place >= 0:
                found.append(token)
            if next_place > end:
                self._num_taken = end - place
                break
            self._tokens.popleft()
            place = next_place
        return found

    def _forget(self, num_kept: int) -> None:
        """Drop tokens, except for the last."""
        num_bytes = -self._num_taken
        while len(self._tokens) > num_kept:
            num_bytes += len(self._tokens.popleft().data)
            self._num_taken = 0
        del self._data[: max(num_bytes, 0)]


def in_event(token: TokenInfo) -> dict[str, Any]:
    """Return what events of text have of a token."""
    top = [_shown(other.data, other.logprob) for other in token.top]
    return {**_shown(token.data, token.logprob), "top_logprobs": top}


def in_part(token: TokenInfo) -> dict[str, Any]:
    """Return what a part of a message has of a token: the bytes, too."""
    top = [_with_bytes(other.data, other.logprob) for other in token.top]
    return {**_with_bytes(token.data, token.logprob), "top_logprobs": top}


def _shown(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "logprob": logprob}


def _with_bytes(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {**_shown(data, logprob), "bytes": list(data)}

"""Telling the channels of gpt-oss apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum, auto

from deployments.parsers.marks import without_part
from deployments.parsers.reasoning_parser import ReasoningParser, Split
from hdserve import grammar

_START, _CHANNEL, _MESSAGE, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_CONSTRAIN = "<|constrain|>"
_CLOSING = ("<|end|>", "<|return|>", _CALL)
_OPENING = (_START, _CHANNEL)
_END = re.compile("|".join(map(re.escape, (*_CLOSING, *_OPENING))))
_HEADER_BEGINNINGS = (*_OPENING, "to=")
_BARE_TEXT = re.compile(rf"{re.escape(_START)}assistant(?=[^\s<])")
_MAX_HEADER = 256
_NAME = re.compile(r"\bto=functions\.([\w.-]{1,128})")


class _Kind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class HarmonyParser(ReasoningParser):
    """Messages in channels, as gpt-oss writes them after ``<|start|>assistant``::

        <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

    Those of the channel ``analysis`` are reasoning, others text; calls are converted to the form
    that :class:`~deployments.parsers.tool_parsers.HarmonyToolParser` reads::

        <|channel|>commentary to=functions.NAME<|message|>{...}<|call|>

    Without tools, nothing reads that form, and a call is a message of its channel like any other.
    Several messages of a kind are separated by a line break.
    """

    OPEN, CLOSE = "<|channel|>analysis<|message|>", "<|end|>"

    def __init__(self, *, is_open: bool, has_tools: bool = True) -> None:
        super().__init__(is_open=is_open, has_tools=has_tools)
        self._held = ""
        self._kind: _Kind | None = None
        """The kind of the message whose text is arriving; ``None`` in a header."""
        self._is_next = False
        """Whether a line break is before what the message says, if it says something."""
        self._given = {_Kind.REASONING: False, _Kind.TEXT: False, _Kind.CALL: False}
        self._has_begun = is_open
        if is_open:
            self._kind, self.has_reasoned = _Kind.REASONING, True

    @classmethod
    def grammar(cls, answer: str, *, is_open: bool) -> str:
        """Return the grammar of messages of the channel ``analysis``, and an answer in the channel
        ``final``, or in that which it names itself, as calls do."""
        begun = "thought next" if is_open else ""
        header = "header?" if _CHANNEL in answer else "header"
        rules = [
            f'start: {begun} (channel "analysis" message thought next)* {header} @answer',
            'next: begin "assistant"',
            'header: channel "final" (" " constrain "json")? message',
        ]
        marks = {"begin": _START, "channel": _CHANNEL, "message": _MESSAGE, "constrain": _CONSTRAIN}
        thoughts = {"thought": [cls.CLOSE, *_OPENING, _MESSAGE]}
        return grammar.behind("\n".join(rules), answer, marks, thoughts)

    @property
    def is_over(self) -> bool:
        return self._has_begun and self._kind is not _Kind.REASONING

    def push(self, text: str) -> Split:
        self._held += text
        return _joined(self._take())

    def finish(self) -> Split:
        rest, self._held = self._held, ""
        if self._kind is None and rest.lstrip().startswith(_OPENING):
            return Split("", "")  # a header that was cut off
        return _joined([self._as(self._kind or _Kind.TEXT, rest)])

    def _take(self) -> Iterator[Split]:
        while self._held:
            kind = self._kind
            if kind is None:
                yield self._begin()
                if self._kind is None:
                    return
                continue
            end = _END.search(self._held)
            body = (
                self._held[: end.start()] if end else without_part(self._held, *_CLOSING, *_OPENING)
            )
            self._held = self._held[len(body) :]
            yield self._as(kind, body)
            if end is None:
                return
            if end[0] in _CLOSING:
                self._held = self._held.removeprefix(end[0])
            if kind is _Kind.CALL:
                yield Split("", _CALL)
            self._kind, self._is_next = None, False

    def _begin(self) -> Split:
        """Read a header, if it is complete; what cannot be one is text."""
        begun = self._held.lstrip()
        if bare := _BARE_TEXT.match(begun):
            self._held, self._kind, self._has_begun = begun[bare.end() :], _Kind.TEXT, True
            return Split("", "")
        at = begun.find(_MESSAGE, 0, _MAX_HEADER + len(_MESSAGE))
        is_too_long = at < 0 and len(begun) >= _MAX_HEADER + len(_MESSAGE)
        if is_too_long or not _may_begin_header(begun):
            mark = next((mark for mark in _OPENING if begun.startswith(mark)), "")
            self._held = begun.removeprefix(mark) if mark else self._held
            self._kind, self._has_begun = _Kind.TEXT, True
        elif at >= 0:
            self._held, self._has_begun = begun[at + len(_MESSAGE) :], True
            return self._open(begun[:at])
        return Split("", "")

    def _open(self, header: str) -> Split:
        if self._has_tools and (name := _NAME.search(header)):
            self._kind = _Kind.CALL
            return Split("", f"{_CHANNEL}commentary to=functions.{name[1]}{_MESSAGE}")
        is_analysis = header.partition(_CHANNEL)[2].lstrip().startswith("analysis")
        self._kind = _Kind.REASONING if is_analysis else _Kind.TEXT
        self.has_reasoned |= is_analysis
        self._is_next = self._given[self._kind]
        return Split("", "")

    def _as(self, kind: _Kind, body: str) -> Split:
        if body and self._is_next:
            body, self._is_next = f"\n{body}", False
        self._given[kind] |= bool(body)
        return Split(body, "") if kind is _Kind.REASONING else Split("", body)


def _may_begin_header(text: str) -> bool:
    return any(text.startswith(mark) or mark.startswith(text) for mark in _HEADER_BEGINNINGS)


def _joined(splits: Iterable[Split]) -> Split:
    found = list(splits)
    return Split("".join(part.reasoning for part in found), "".join(part.text for part in found))

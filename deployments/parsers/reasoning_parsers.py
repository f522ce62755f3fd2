"""Separating reasoning from text by the marks that models write."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import ClassVar

from deployments.parsers.harmony_parser import HarmonyParser
from deployments.parsers.marks import num_held
from deployments.parsers.reasoning_parser import ReasoningParser, Split
from hdserve import grammar


class _Stage(Enum):
    BEFORE = auto()
    INSIDE = auto()
    BEHIND = auto()
    """After the closing mark, where white space still belongs to the mark."""
    TEXT = auto()


class ThinkParser(ReasoningParser):
    """``<think>...</think>`` at the start of an answer, as DeepSeek-R1 and Qwen3 write it.

    A mark that is never completed is text.  White space next to a mark is neither reasoning nor
    text. Without a closing mark everything is reasoning.
    """

    OPEN, CLOSE = "<think>", "</think>"
    _NAME: ClassVar[str] = ""
    """The end of the opening mark that is no part of a special token."""

    def __init__(self, *, is_open: bool, has_tools: bool = True) -> None:
        super().__init__(is_open=is_open, has_tools=has_tools)
        self._stage = _Stage.BEFORE
        self._held = ""
        self._is_blank = True

    @classmethod
    def grammar(cls, answer: str, *, is_open: bool) -> str:
        name = grammar.quoted(cls._NAME) if cls._NAME else ""
        reasoning = "thought blank" if is_open else f"(opening {name} thought blank)?"
        rules = [f"start: {reasoning} @answer", r"blank: /\n{0,2}/"]
        marks = {"opening": cls.OPEN.removesuffix(cls._NAME)}
        return grammar.behind("\n".join(rules), answer, marks, {"thought": [cls.CLOSE]})

    @property
    def is_over(self) -> bool:
        return self._stage in (_Stage.BEHIND, _Stage.TEXT)

    def push(self, text: str) -> Split:
        if self._stage is _Stage.TEXT:
            return Split("", text)
        self._held += text
        if self._stage is _Stage.BEFORE:
            self._begin()
        reasoning = self._reason() if self._stage is _Stage.INSIDE else ""
        return Split(reasoning, self._say() if self.is_over else "")

    def finish(self) -> Split:
        if self._stage is _Stage.BEFORE and self._is_open:
            self._enter(self._held)
        rest, self._held = self._held, ""
        if self._stage is _Stage.INSIDE:
            return Split(rest.lstrip() if self._is_blank else rest, "")
        return Split("", rest)

    def _begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self.OPEN):
            self._enter(begun.removeprefix(self.OPEN))
        elif self.OPEN.startswith(begun):
            return
        elif self._is_open:
            self._enter(begun)
        else:
            self._stage = _Stage.TEXT

    def _enter(self, inside: str) -> None:
        self._stage, self._held, self.has_reasoned = _Stage.INSIDE, inside, True

    def _reason(self) -> str:
        inside = self._held.lstrip() if self._is_blank else self._held
        before, mark, after = inside.partition(self.CLOSE)
        if mark:
            self._stage, self._held = _Stage.BEHIND, after
            shown = before.rstrip()
        else:
            shown = before[: len(before) - num_held(before, self.CLOSE)]
            self._held = before[len(shown) :]
        self._is_blank &= not shown
        return shown

    def _say(self) -> str:
        said = self._held.lstrip() if self._stage is _Stage.BEHIND else self._held
        self._held = ""
        if said:
            self._stage = _Stage.TEXT
        return said


class MistralThinkParser(ThinkParser):
    """What :class:`ThinkParser` reads, with the marks of Mistral."""

    OPEN, CLOSE = "[THINK]", "[/THINK]"


class GemmaThinkParser(ThinkParser):
    """What :class:`ThinkParser` reads, with the marks of Gemma 4, which also writes them around
    nothing."""

    OPEN, CLOSE = "<|channel>thought", "<channel|>"
    _NAME = "thought"


REASONING_PARSERS: Mapping[str, type[ReasoningParser]] = {
    "think": ThinkParser,
    "mistral": MistralThinkParser,
    "gemma": GemmaThinkParser,
    "harmony": HarmonyParser,
}
"""The parsers by their names in ``reasoning_parser`` of the configuration."""

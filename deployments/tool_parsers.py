"""Reading the tool calls in what a model writes, and the grammars that make it write one."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from hdserve import grammar

_DEFINITIONS = ("$defs", "definitions")


class Function(NamedTuple):
    """A function that can be called; ``parameters`` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any]


class ToolCall(NamedTuple):
    """A call; ``arguments`` is a JSON text."""

    name: str
    arguments: str


class ToolParser(ABC):
    """Splits the text of one answer, as it comes, into plain text and calls.

    A call is given out when it is complete; what turns out to be none is plain text.
    """

    arguments_key: ClassVar[str] = "arguments"

    @abstractmethod
    def push(self, text: str) -> list[str | ToolCall]:
        """What is certain now that ``text`` has come."""

    @abstractmethod
    def finish(self) -> list[str | ToolCall]:
        """The rest: the answer has ended."""

    @classmethod
    @abstractmethod
    def grammar(cls, functions: Sequence[Function], *, is_one: bool) -> str:
        """Answers that are calls of ``functions`` and nothing else.

        Args:
            is_one: whether there is exactly one call.
        """


class HermesToolParser(ToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write it.

    White space next to a call is no text.
    """

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._buffer = ""
        self._is_inside = False
        self._has_called = False

    def push(self, text: str) -> list[str | ToolCall]:
        self._buffer += text
        return list(self._take())

    def finish(self) -> list[str | ToolCall]:
        rest, self._buffer = self._buffer, ""
        if self._is_inside:
            calls = _calls(rest, self.arguments_key)
            return [*calls] if calls else [self._OPEN + rest]
        return [rest] if rest and not (self._has_called and rest.isspace()) else []

    def _take(self) -> Iterator[str | ToolCall]:
        while True:
            tag = self._CLOSE if self._is_inside else self._OPEN
            before, found, after = self._buffer.partition(tag)
            if not found:
                break
            self._buffer = after
            yield from self._inside(before) if self._is_inside else self._outside(before)
            self._is_inside = not self._is_inside
        if not self._is_inside:
            num_held = _num_held(self._buffer, self._OPEN)
            shown = self._buffer[: len(self._buffer) - num_held]
            self._buffer = self._buffer[len(shown) :]
            if shown:
                yield shown

    def _outside(self, text: str) -> Iterator[str]:
        if text := text.rstrip():
            yield text

    def _inside(self, text: str) -> Iterator[str | ToolCall]:
        calls = _calls(text, self.arguments_key)
        self._has_called |= bool(calls)
        yield from calls
        if not calls:
            yield f"{self._OPEN}{text}{self._CLOSE}"

    @classmethod
    def grammar(cls, functions: Sequence[Function], *, is_one: bool) -> str:
        opening, closing = grammar.quoted(f"{cls._OPEN}\n"), grammar.quoted(f"\n{cls._CLOSE}")
        more = "" if is_one else ' ("\\n" call)*'
        rules = [f"start: call{more}", f"call: {opening} json {closing}"]
        return grammar.lark("\n".join([*rules, *_json_rules(functions, cls.arguments_key)]))


class Llama3JsonToolParser(ToolParser):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, several with ``;`` between them,
    as Llama 3.1 and 3.2 write it."""

    arguments_key = "parameters"
    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._buffer = ""
        self._is_text = False

    def push(self, text: str) -> list[str | ToolCall]:
        if self._is_text:
            return [text] if text else []
        self._buffer += text
        begun = self._buffer.lstrip()
        if not begun or begun[0] == "{" or _begins(begun, self._TAG):
            return []
        self._is_text = True
        return [self._buffer]

    def finish(self) -> list[str | ToolCall]:
        if self._is_text or not self._buffer:
            return []
        calls = _calls(self._buffer.strip().removeprefix(self._TAG), self.arguments_key)
        return [*calls] if calls else [self._buffer]

    @classmethod
    def grammar(cls, functions: Sequence[Function], *, is_one: bool) -> str:
        more = "" if is_one else ' ("; " json)*'
        rules = _json_rules(functions, cls.arguments_key)
        return grammar.lark("\n".join([f"start: json{more}", *rules]))


TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
    "llama3_json": Llama3JsonToolParser,
}
"""By the names of ``tool_parser`` in the configuration."""


def _json_rules(functions: Sequence[Function], arguments_key: str) -> Iterator[str]:
    """Lark rules; ``json`` is a call of one of ``functions``."""
    yield "json: " + " | ".join(f"json_{index}" for index in range(len(functions)))
    for index, function in enumerate(functions):
        schema = _call_schema(function, arguments_key)
        yield f"json_{index}: %json {json.dumps(grammar.with_json_options(schema))}"


def _call_schema(function: Function, arguments_key: str) -> dict[str, Any]:
    """The schema of a call; definitions move to its root, where references look for them."""
    parameters = dict(function.parameters)
    definitions = {key: parameters.pop(key) for key in _DEFINITIONS if key in parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, arguments_key: parameters},
        "required": ["name", arguments_key],
        "additionalProperties": False,
        **definitions,
    }


def _calls(text: str, arguments_key: str) -> list[ToolCall]:
    """The calls ``text`` consists of; none if it is anything else."""
    decoder = json.JSONDecoder()
    found, rest = [], text.strip()
    try:
        while rest:
            data, end = decoder.raw_decode(rest)
            arguments = data[arguments_key]
            if not isinstance(data["name"], str) or not isinstance(arguments, dict):
                return []
            found.append(ToolCall(data["name"], json.dumps(arguments, ensure_ascii=False)))
            rest = rest[end:].lstrip("; \n\t")
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return found


def _num_held(text: str, tag: str) -> int:
    """Length of the end of ``text`` that may belong to ``tag``, white space before it included."""
    num_tag = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
    before = text[: len(text) - num_tag]
    return len(text) - len(before.rstrip())


def _begins(text: str, tag: str) -> bool:
    return text.startswith(tag) or tag.startswith(text)


def joined(parts: Iterable[str | ToolCall]) -> tuple[str, list[ToolCall]]:
    """The text of an answer, and its calls."""
    parts = list(parts)
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, ToolCall)]

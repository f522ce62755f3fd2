"""Reading the tool calls in what a model writes, and the grammars that make it write one."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from deployments.call_reader import Arguments, CallBegin, CallPart, CallReader
from hdserve import grammar

_SCHEMAS_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
_NO_SCHEMAS = frozenset({"const", "default", "enum", "examples"})
"""Keywords of a JSON schema whose values are those of an instance."""


class Function(NamedTuple):
    """A function that can be called; ``parameters`` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any]


class ToolCall(NamedTuple):
    """A call; ``arguments`` is a JSON text."""

    name: str
    arguments: str


Part = str | CallPart


class ToolParser(ABC):
    """Splits the text of one answer, as it comes, into plain text and calls.

    A call is given out from where it is certain to be one; what turns out to be none is plain text.
    """

    arguments_key: ClassVar[str] = "arguments"

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """What is certain now that ``text`` has come."""

    @abstractmethod
    def finish(self) -> list[Part]:
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
        self._calls: CallReader | None = None
        self._has_called = False

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        return list(self._take())

    def finish(self) -> list[Part]:
        if self._calls is not None:
            return list(self._end(self._calls, ""))
        rest, self._buffer = self._buffer, ""
        return [rest] if rest and not (self._has_called and rest.isspace()) else []

    def _take(self) -> Iterator[Part]:
        while self._buffer:
            if self._calls is None:
                yield from self._outside()
                if self._calls is None:
                    return
            else:
                text, self._buffer = self._buffer, ""
                yield from self._calls.push(text)
                if self._calls.is_closed:
                    self._buffer = self._calls.rest
                    yield from self._end(self._calls, self._CLOSE)

    def _outside(self) -> Iterator[str]:
        before, tag, after = self._buffer.partition(self._OPEN)
        if tag:
            self._calls = CallReader(self.arguments_key, self._CLOSE)
            shown, self._buffer = before.rstrip(), after
        else:
            shown = before[: len(before) - num_held(before, self._OPEN)]
            self._buffer = before[len(shown) :]
        if shown:
            yield shown

    def _end(self, calls: CallReader, closing: str) -> Iterator[Part]:
        self._calls = None
        yield from calls.end()
        self._has_called |= calls.num_calls > 0
        if not calls.num_calls:
            yield f"{self._OPEN}{calls.kept}{closing}"
        elif calls.kept:
            yield calls.kept

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
        self._calls: CallReader | None = None
        self._is_text = False

    def push(self, text: str) -> list[Part]:
        if self._is_text:
            return [text] if text else []
        if self._calls is not None:
            return [*self._calls.push(text)]
        self._buffer += text
        begun = self._buffer.lstrip()
        if begun.startswith(("{", self._TAG)):
            self._calls = CallReader(self.arguments_key)
            calls = begun.removeprefix(self._TAG)
            self._buffer = self._buffer.removesuffix(calls)
            return [*self._calls.push(calls)]
        if self._TAG.startswith(begun):
            return []
        self._is_text = True
        return [self._buffer]

    def finish(self) -> list[Part]:
        if self._calls is None:
            return [self._buffer] if self._buffer and not self._is_text else []
        parts: list[Part] = [*self._calls.end()]
        rest = self._calls.kept if self._calls.num_calls else self._buffer + self._calls.kept
        return [*parts, rest] if rest else parts

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
    """The schema of a call.  What the parameters refer to in themselves is looked for from its
    root, unless they have an ``$id``."""
    parameters = function.parameters
    if "$id" not in parameters:
        parameters = _rebased(parameters, f"#/properties/{arguments_key}")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, arguments_key: parameters},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _rebased(schema: Any, root: str) -> Any:
    """``schema`` with references to its own root, and from there, that begin at ``root``."""
    if isinstance(schema, list):
        return [_rebased(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[key] = root + value.removeprefix("#")
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _rebased(item, root) for name, item in value.items()}
        else:
            found[key] = value if key in _NO_SCHEMAS else _rebased(value, root)
    return found


def num_held(text: str, tag: str) -> int:
    """Length of the end of ``text`` that may belong to ``tag``, white space before it included."""
    num_tag = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
    before = text[: len(text) - num_tag]
    return len(text) - len(before.rstrip())


def joined(parts: Iterable[Part]) -> tuple[str, list[ToolCall]]:
    """The text of an answer, and its calls."""
    text, calls = "", list[ToolCall]()
    for part in parts:
        match part:
            case str():
                text += part
            case CallBegin(name):
                calls.append(ToolCall(name, ""))
            case Arguments(piece):
                calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + piece)
    return text, calls

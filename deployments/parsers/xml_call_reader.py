"""Reading tool calls whose arguments are elements, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from deployments.parsers.call_elements import QWEN, Elements
from deployments.parsers.call_reader import Arguments, CallBegin, CallPart, CallReader
from deployments.parsers.tool_parser import Function

_TypesByRef = dict[str, frozenset[str] | None]

_WORDS = {"True": True, "False": False, "None": None}
"""Values of Python that templates write where JSON has others."""

_TYPES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


class XmlCallReader(CallReader):
    """Reads calls of elements, or such as :class:`CallReader` does.

    An argument that is a text is given out as it comes, others when they are complete.

    Args:
        functions: which say of what type arguments are.
        elements: that calls are made of.
    """

    def __init__(
        self, closing: str, functions: Iterable[Function], elements: Elements = QWEN
    ) -> None:
        super().__init__(closing)
        self._elements = elements
        self._schemas = {item.name: item.parameters for item in functions}
        self._function: _OpenFunction | None = None
        self._is_json = False

    def end(self) -> list[CallPart]:
        if self._function is None:
            return super().end()
        self.kept = ""
        return []

    def _take(self) -> Iterator[CallPart]:
        while not self.is_closed:
            if self._function is not None:
                text, self.kept = self._function.read(self.kept)
                is_last = self._function.is_over
                if text:
                    yield Arguments(text, is_last)
                if not is_last:
                    return
                self._function = None
            elif not self._is_json and (head := self._elements.head.match(self.kept)):
                self.kept = self.kept[head.end() :]
                self.num_calls += 1
                schema = self._schemas.get(head[1], {})
                self._function = _OpenFunction(schema, self._closing, self._elements)
                yield CallBegin(head[1])
            else:
                num_calls = self.num_calls
                yield from super()._take()
                self._is_json |= self.num_calls > num_calls
                return


class _OpenFunction:
    """A call from behind its name on.

    Attributes:
        is_over: whether it is complete.
    """

    def __init__(self, schema: Mapping[str, Any], closing: str, elements: Elements) -> None:
        self._root = schema
        self._elements = elements
        self._ends = tuple(filter(None, (elements.function_end, closing)))
        self._separator = "{"
        self._types: frozenset[str] | None = None
        self._is_inside = False
        self._is_string = False
        self._is_first = False
        self.is_over = False

    def read(self, text: str) -> tuple[str, str]:
        """Return the next of the arguments, a JSON text, and what is left of ``text``."""
        found = ""
        while text and not self.is_over:
            piece, rest = self._value(text) if self._is_inside else self._between(text)
            found += piece
            if not piece and rest == text:
                break
            text = rest
        return found, text

    def _between(self, text: str) -> tuple[str, str]:
        text = text.lstrip()
        argument = self._elements.argument
        if text.startswith(argument):
            named = self._elements.named.search(text)
            if named is None:
                return "", text
            return self._open(text[len(argument) : named.start()]), text[named.end() :]
        if text.startswith(self._ends):
            self.is_over = True
            closing = "{}" if self._separator == "{" else "}"
            return closing, text.removeprefix(self._elements.function_end)
        may_be_more = any(mark.startswith(text) for mark in (argument, *self._ends))
        return "", text if may_be_more else text[1:]

    def _open(self, name: str) -> str:
        properties = self._root.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        self._types = types_of(schema, self._root)
        self._is_string = self._types is not None and self._types == {"string"}
        self._is_inside = self._is_first = True
        opening = f"{self._separator}{json.dumps(name, ensure_ascii=False)}: "
        self._separator = ", "
        return opening + ('"' if self._is_string else "")

    def _value(self, text: str) -> tuple[str, str]:
        marks = self._elements.value_ends
        ends = [end for mark in marks if (end := text.find(mark)) >= 0]
        if ends:
            self._is_inside = False
            value, rest = text[: min(ends)], text[min(ends) :]
            if self._elements.has_lines:
                value = value.removesuffix("\n")
            return self._last(self._begun(value)), rest.removeprefix(marks[0])
        if not self._is_string:
            return "", text
        shown = self._elements.without_end(text)
        return _escaped(self._begun(shown)), text[len(shown) :]

    def _begun(self, value: str) -> str:
        """Return a piece of a value without the line break before the first."""
        if value and self._is_first:
            self._is_first = False
            return value.removeprefix("\n") if self._elements.has_lines else value
        return value

    def _last(self, value: str) -> str:
        if self._is_string:
            return _escaped(value) + '"'
        return json.dumps(value_of(value, self._types), ensure_ascii=False)


def types_of(schema: Any, root: Mapping[str, Any] | None = None) -> frozenset[str] | None:
    """Return the JSON types ``schema`` allows; ``None`` for any.  What nobody described is a text.

    Args:
        root: what references in ``schema`` begin at.
    """
    if schema is None:
        return frozenset({"string"})
    try:
        return _types_of(schema, root or {}, {})
    except RecursionError:
        return None


def _types_of(schema: Any, root: Mapping[str, Any], found: _TypesByRef) -> frozenset[str] | None:
    if not isinstance(schema, Mapping):
        return None
    allowed = [_declared(schema), _of_values(schema), _of_reference(schema, root, found)]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), (list, tuple)):
            types = [_types_of(item, root, found) for item in schema[key]]
            if key == "allOf":
                allowed += types
            elif None not in types:
                allowed.append(frozenset().union(*filter(None, types)))
    known = [types for types in allowed if types is not None]
    return frozenset.intersection(*known) if known else None


def _declared(schema: Mapping[str, Any]) -> frozenset[str] | None:
    declared = schema.get("type")
    if isinstance(declared, str):
        declared = [declared]
    if not isinstance(declared, (list, tuple)):
        return None
    types = frozenset(map(str, declared))
    return types | {"integer"} if "number" in types else types


def _of_values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the type of the values that ``enum`` or ``const`` lists, where they are texts."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    is_text = isinstance(values, (list, tuple)) and values
    return frozenset({"string"}) if is_text and all(isinstance(v, str) for v in values) else None


def _of_reference(
    schema: Mapping[str, Any], root: Mapping[str, Any], found: _TypesByRef
) -> frozenset[str] | None:
    """Return the types that what ``$ref`` refers to allows.  Each reference is followed once; in
    what it refers to it allows nothing more."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or f"{reference}/"[:2] != "#/":
        return None
    if reference not in found:
        found[reference] = frozenset()
        found[reference] = _types_of(_at(root, reference), root, found)
    return found[reference]


def _at(root: Mapping[str, Any], reference: str) -> Any:
    """Return what a JSON pointer in ``root`` points to, if it is there."""
    schema: Any = root
    for part in unquote(reference).split("/")[1:]:
        if not isinstance(schema, Mapping):
            return None
        schema = schema.get(part.replace("~1", "/").replace("~0", "~"))
    return schema


def value_of(text: str, types: frozenset[str] | None) -> Any:
    """Read ``text`` as JSON of one of ``types``; return it as the text it is where it is none."""
    try:
        value = _WORDS[text] if text in _WORDS else json.loads(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        return text
    if types is None:
        return value
    is_fit = not isinstance(value, str) and types.intersection(_TYPES[type(value)])
    return value if is_fit else text


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

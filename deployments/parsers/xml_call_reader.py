"""Reading tool calls whose arguments are elements, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deployments.parsers.call_elements import QWEN, Elements
from deployments.parsers.call_reader import CallReader
from deployments.parsers.marks import without_part
from deployments.parsers.own_form_reader import OpenArguments, OwnFormReader
from deployments.parsers.tool_parser import Function
from hdserve.schema.references import referred

Types = frozenset[str] | None
"""The JSON types that a value may have; ``None`` for any."""

_MAX_PARTS = 1000
"""Parts of an argument's schema that are read for its types."""

_WORDS = {"True": True, "False": False, "None": None}
"""Python values that templates write where JSON has others."""

_TYPES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def xml_call_reader(
    closing: str, types: ArgumentTypes, elements: Elements = QWEN, *, is_bare: bool = False
) -> CallReader:
    """Return a reader of calls made of elements, and of those that :class:`CallReader` reads.

    An argument that is a text is passed on as it arrives, others when they are complete.

    Args:
        types: of the arguments.
        elements: that calls consist of.
        is_bare: see :class:`OwnFormReader`.
    """

    def begin(name: str) -> OpenArguments:
        return _XmlArguments(partial(types.of, name), closing, elements)

    return OwnFormReader(closing, elements.head, begin, is_bare=is_bare)


class _XmlArguments(OpenArguments):
    """The arguments of a call, from after its name on."""

    def __init__(
        self, types_of_name: Callable[[str], Types], closing: str, elements: Elements
    ) -> None:
        super().__init__()
        self._types_of_name = types_of_name
        self._elements = elements
        self._marks = [*filter(None, (elements.argument, elements.function_end, closing))]
        self._mark = re.compile("|".join(map(re.escape, self._marks)))
        self._overlap = max(map(len, elements.value_ends)) - 1
        self._num_searched = 0
        self._separator = "{"
        self._types: Types = None
        self._is_inside = False
        self._is_string = False
        self._is_first = False

    def _next(self, text: str) -> tuple[str, str]:
        return self._value(text) if self._is_inside else self._between(text)

    def _between(self, text: str) -> tuple[str, str]:
        mark = self._mark.search(text)
        if mark is None:
            return "", text[len(without_part(text, *self._marks)) :]
        text = text[mark.start() :]
        if mark[0] != self._elements.argument:
            self.are_complete = self.is_over = True
            closing = "{}" if self._separator == "{" else "}"
            return closing, text.removeprefix(self._elements.function_end)
        named = self._elements.named.search(text, self._num_searched)
        if named is None:
            self._num_searched = self._end_of_name(text)
            return "", text
        return self._open(text[len(mark[0]) : named.start()]), text[named.end() :]

    def _end_of_name(self, text: str) -> int:
        """Return where the end of an argument's name may be, in a text that has not all of it."""
        mark = self._elements.name_end
        begun = text.rfind(mark, self._num_searched)
        return begun if begun >= 0 else max(0, len(text) - len(mark) + 1)

    def _open(self, name: str) -> str:
        self._types = self._types_of_name(name)
        self._is_string = self._types == frozenset({"string"})
        self._is_inside = self._is_first = True
        self._num_searched = 0
        opening = f"{self._separator}{json.dumps(name, ensure_ascii=False)}: "
        self._separator = ", "
        return opening + ('"' if self._is_string else "")

    def _value(self, text: str) -> tuple[str, str]:
        """Continue in a value.  What has arrived of one that is read as a whole is searched once,
        except for what may begin a mark."""
        marks = self._elements.value_ends
        start = max(0, self._num_searched - self._overlap)
        ends = [end for mark in marks if (end := text.find(mark, start)) >= 0]
        if ends:
            self._is_inside, self._num_searched = False, 0
            value, rest = text[: min(ends)], text[min(ends) :]
            if self._elements.has_lines:
                value = value.removesuffix("\n")
            return self._last(self._begun(value)), rest.removeprefix(marks[0])
        if not self._is_string:
            self._num_searched = len(text)
            return "", text
        shown = self._elements.without_end(text)
        return _escaped(self._begun(shown)), text[len(shown) :]

    def _begun(self, value: str) -> str:
        """Return a piece of a value, without a line break at the value's beginning."""
        if value and self._is_first:
            self._is_first = False
            return value.removeprefix("\n") if self._elements.has_lines else value
        return value

    def _last(self, value: str) -> str:
        if self._is_string:
            return _escaped(value) + '"'
        return json.dumps(value_of(value, self._types), ensure_ascii=False)


class ArgumentTypes:
    """The types of the arguments of functions.

    Each is computed once per answer: a schema may be long, and would be needed again with every few
    tokens.
    """

    def __init__(self, functions: Iterable[Function]) -> None:
        self._schemas = {item.name: item.parameters for item in functions}
        self._found: dict[tuple[str, str], Types] = {}

    def of(self, function: str, name: str) -> Types:
        """Return the types of the argument of that name."""
        if (function, name) not in self._found:
            root = self._schemas.get(function, {})
            found = [types_of(schema, root) for schema in _properties(root, name)]
            known = [types for types in found if types is not None]
            of_any = None if found else types_of(None)
            self._found[function, name] = frozenset().union(*known) if known else of_any
        return self._found[function, name]


def _properties(root: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield what ``root`` says of a property of that name, itself and by its references, and the
    alternatives it has."""
    parts: deque[Any] = deque([root])
    seen: set[int] = set()
    while parts and len(seen) < _MAX_PARTS:
        part = parts.popleft()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        properties = part.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
        if _is_reference(part):
            with suppress(ValueError):  # it is too long
                parts.append(referred(part, root))
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(part.get(key), (list, tuple)):
                parts += part[key]


def types_of(schema: Any, root: Mapping[str, Any] | None = None) -> Types:
    """Return the JSON types that ``schema`` allows; ``None`` for any; text if nothing is described.
    If it has too many parts to be read beside other answers, those it declares itself.

    Args:
        root: the schema that references in ``schema`` are relative to.
    """
    if schema is None:
        return frozenset({"string"})
    try:
        return _types_of(schema, _Search(root or {}))
    except (RecursionError, ValueError):
        return _declared(schema)


@dataclass(slots=True)
class _Search:
    """How far types were sought below ``root``; ``found`` are those of targets of references, by
    their identity."""

    root: Mapping[str, Any]
    found: dict[int, Types] = field(default_factory=dict)
    num_parts: int = 0


def _types_of(schema: Any, search: _Search) -> Types:
    """
    Raises:
        ValueError: there are too many parts.
    """
    if not isinstance(schema, Mapping):
        return None
    search.num_parts += 1
    if search.num_parts > _MAX_PARTS:
        raise ValueError("too many parts")
    allowed = [_declared(schema), _of_values(schema), _of_reference(schema, search)]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), (list, tuple)):
            types = [_types_of(item, search) for item in schema[key]]
            if key == "allOf":
                allowed += types
            elif None not in types:
                allowed.append(frozenset().union(*filter(None, types)))
    known = [types for types in allowed if types is not None]
    return frozenset.intersection(*known) if known else None


def _declared(schema: Mapping[str, Any]) -> Types:
    declared = schema.get("type")
    if isinstance(declared, str):
        declared = [declared]
    if not isinstance(declared, (list, tuple)):
        return None
    types = frozenset(map(str, declared))
    return types | {"integer"} if "number" in types else types


def _of_values(schema: Mapping[str, Any]) -> Types:
    """Return the type of the values listed by ``enum`` or ``const``, if they are texts."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    is_text = isinstance(values, (list, tuple)) and values
    return frozenset({"string"}) if is_text and all(isinstance(v, str) for v in values) else None


def _is_reference(schema: Mapping[str, Any]) -> bool:
    """Whether ``schema`` refers to another part of its document."""
    reference = schema.get("$ref")
    return isinstance(reference, str) and f"{reference}/"[:2] == "#/"


def _of_reference(schema: Mapping[str, Any], search: _Search) -> Types:
    """Return the types allowed by the target of ``$ref``.  Each target is read once; repeated
    within itself it allows nothing more."""
    if not _is_reference(schema):
        return None
    target = referred(schema, search.root)
    if id(target) not in search.found:
        search.found[id(target)] = frozenset()
        search.found[id(target)] = _types_of(target, search)
    return search.found[id(target)]


def value_of(text: str, types: Types) -> Any:
    """Read ``text`` as JSON of one of ``types``; if it is not, return it as text."""
    try:
        value = _WORDS[text] if text in _WORDS else json.loads(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # fails for half of a surrogate pair
    except (ValueError, RecursionError):
        return text
    if types is None:
        return value
    is_fit = not isinstance(value, str) and types.intersection(_TYPES[type(value)])
    return value if is_fit else text


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

"""Making the property that distinguishes alternatives required.

pydantic leaves properties with a default out of ``required``, even the constant that distinguishes
the alternatives of a ``oneOf``.  An object without it could match several of them, and llguidance
refuses alternatives that it cannot tell apart, or that refer to themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from hdserve.schema.parts import Schema, subschemas, walk, with_subschemas
from hdserve.schema.references import referred
from hdserve.schema.values import texts_of

_MAX_TEXTS = 64
"""The most constants by which an alternative is distinguished from others."""

_DEFINITION = re.compile(r"#(/properties/[^/]+)?/(\$defs|definitions)/[^/]+")
"""References to definitions of a schema, or of the arguments in the schema of a call, none of which
is nested in another one."""


def told_apart(schema: Schema) -> Schema:
    """Return ``schema`` with the property that a ``discriminator`` names required in each
    alternative of its ``oneOf``, if each has another text; the ``oneOf`` becomes ``anyOf``.

    The result allows only what ``schema`` allows.  An alternative given by reference may be used
    elsewhere too, so it gets one new definition.  A schema that contains an ``$id`` is unchanged,
    as references in it have another base.

    Raises:
        RecursionError: it is too deep.
    """
    forms = Forms(schema)
    found = forms.rewritten(schema)
    definitions = dict(forms.definitions())
    return {**found, "$defs": {**found.get("$defs", {}), **definitions}} if definitions else found


def has_id(schema: Schema) -> bool:
    """Return whether a schema below ``schema`` has an ``$id``, which makes another base of it."""
    return any("$id" in item for item in walk(schema, subschemas) if item is not schema)


class _Form(NamedTuple):
    """What a schema says of a property that may distinguish it.

    Attributes:
        texts: those that the property can be; none if it can be anything else.
    """

    schema: Schema
    texts: set[str]
    is_required: bool


_UNKNOWN = _Form({}, set(), is_required=False)


class Forms:
    """The alternatives in a schema, and the new definitions of those given by reference."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._has_place = isinstance(root.get("$defs", {}), Mapping) and not has_id(root)
        """Whether there could be new definitions."""
        self._by_definition: dict[int, tuple[str, _Form]] = {}
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, Schema, str]] = []

    def definitions(self) -> Iterator[tuple[str, Schema]]:
        """Yield those definitions by name; they may contain further alternatives."""
        while self._waiting:
            name, schema, required = self._waiting.pop()
            yield name, _requiring(self.rewritten(schema), required)

    def rewritten(self, schema: Schema) -> Schema:
        """Return a schema with its alternatives told apart."""
        found = with_subschemas(schema, self.rewritten)
        required = self.discriminator(schema)
        if required is not None:
            del found["discriminator"]
            forms = found.pop("oneOf")
            found["anyOf"] = [self._with_required(form, required) for form in forms]
        return found

    def discriminator(self, schema: Schema) -> str | None:
        """Return the property that distinguishes the alternatives of a schema, if one does."""
        if not self._has_place or "anyOf" in schema:
            return None
        discriminator, forms = schema.get("discriminator"), schema.get("oneOf")
        name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
        if not isinstance(name, str) or not isinstance(forms, (list, tuple)):
            return None
        texts = [self._form(form, name).texts for form in forms]
        num_texts = sum(map(len, texts))
        return name if all(texts) and num_texts == len(set().union(*texts)) else None

    def _form(self, schema: Any, name: str) -> _Form:
        """Read what a schema, or the definition it refers to, says of a property.  A definition is
        read only once, for the first property asked for."""
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return _read(schema, name)
        reference = schema["$ref"]
        if not isinstance(reference, str) or not _DEFINITION.fullmatch(unquote(reference)):
            return _UNKNOWN
        definition = referred(schema, self._root)
        if id(definition) not in self._by_definition:
            self._by_definition[id(definition)] = (name, _read(definition, name))
        first_name, form = self._by_definition[id(definition)]
        return form if first_name == name else _UNKNOWN

    def _with_required(self, schema: Schema, name: str) -> Schema:
        """Return an alternative, its parts rewritten, with a property required."""
        form = self._form(schema, name)
        if form.is_required:
            return schema
        if "$ref" not in schema:
            return _requiring(schema, name)
        definition = id(form.schema)
        if definition not in self._names:
            self._names[definition] = self._new_name()
            self._waiting.append((self._names[definition], form.schema, name))
        return {**schema, "$ref": f"#/$defs/{self._names[definition]}"}

    def _new_name(self) -> str:
        name = f"form_{len(self._names)}"
        while name in self._root.get("$defs", {}):
            name += "_"
        return name


def _read(schema: Any, name: str) -> _Form:
    required = schema.get("required", []) if isinstance(schema, Mapping) else None
    if not isinstance(required, (list, tuple)):
        return _UNKNOWN
    texts = texts_of(schema, name)
    return _Form(schema, texts, name in required) if len(texts) <= _MAX_TEXTS else _UNKNOWN


def _requiring(schema: Schema, name: str) -> Schema:
    return {**schema, "required": [*schema.get("required", ()), name]}

"""JSON schemas, rewritten until grammars of llguidance can hold them.

A schema is rewritten in three passes, each for all of it before the next begins.  The examples are
one that a client sends, and what each pass makes of it::

    {"oneOf": [
        {"properties": {"k": {"const": "a"}}, "unevaluatedProperties": false},
        {"properties": {"k": {"const": "b"}}}],
     "discriminator": {"propertyName": "k"}}

1. *Holding* (:mod:`~hdserve.schema.holding`) leaves out what no grammar holds, names it, and writes
   some of it in other words.  It asks what the next passes are going to do: alternatives that are
   told apart keep their ``oneOf``, and an object that lacks a keyword may have to stay open::

    {"oneOf": [
        {"properties": {"k": {"const": "a"}}, "additionalProperties": false},
        {"properties": {"k": {"const": "b"}}}],
     "discriminator": {"propertyName": "k"}}

2. *Telling apart* (:mod:`~hdserve.schema.discriminators`) requires the property that a
   ``discriminator`` names: no value matches two alternatives, and ``anyOf`` says the same::

    {"anyOf": [
        {"properties": {"k": {"const": "a"}}, "additionalProperties": false, "required": ["k"]},
        {"properties": {"k": {"const": "b"}}, "required": ["k"]}]}

3. *Closing* (:mod:`~hdserve.schema.closing`) refuses other properties in objects that list some,
   unless a value may have to match several schemas at once::

    {"anyOf": [
        {"properties": {"k": {"const": "a"}}, "additionalProperties": false, "required": ["k"]},
        {"properties": {"k": {"const": "b"}}, "additionalProperties": false, "required": ["k"]}]}

:func:`rewritten` runs all of them, and :func:`enforceable` the first alone, for a caller who says
what is left out.
"""

from __future__ import annotations

from hdserve.schema.closing import closed
from hdserve.schema.discriminators import told_apart
from hdserve.schema.holding import MAX_UNHELD, Held, held
from hdserve.schema.numbers import check_numbers
from hdserve.schema.parts import Schema
from hdserve.schema.references import check_references
from hdserve.schema.size import check_size

__all__ = ["MAX_UNHELD", "Held", "check_size", "enforceable", "rewritten"]


def rewritten(schema: Schema) -> Schema:
    """Return ``schema`` in the words of grammars, all of it held.

    Raises:
        ValueError: it is too large, its ``multipleOf`` numbers need too many states, a number has
            too many digits, a keyword cannot be enforced, or a reference leads to itself.
        RecursionError: it is too deep.
    """
    check_size(schema)
    check_references(schema)
    check_numbers(schema)
    whole, unheld = held(schema)
    if unheld:
        raise ValueError(f"this keyword cannot be enforced: {unheld[0]}")
    found = told_apart(whole)
    check_size(found)
    return closed(found)


def enforceable(schema: Schema) -> Held:
    """Return what of ``schema`` a grammar can hold.

    Raises:
        ValueError: it is too large or too deep, or a reference leads to itself.
    """
    check_size(schema)
    try:
        check_references(schema)
        return held(schema)
    except RecursionError as error:
        raise ValueError("the schema is too deep") from error

"""A JSON Schema as a whole, and what a part of it can only know from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from hdserve.schema.closing import is_closable
from hdserve.schema.discriminators import Forms, has_id
from hdserve.schema.keywords import TWINS
from hdserve.schema.numbers import has_too_many_multiples
from hdserve.schema.parts import DEFINITIONS, Schema, members, subschemas, walk
from hdserve.schema.references import referred


class Whole:
    """What is asked of a whole schema, each found out once, if at all."""

    def __init__(self, root: Schema) -> None:
        self.root = root

    @cached_property
    def is_closable(self) -> bool:
        """Whether objects are closed later."""
        return is_closable(self.root)

    @cached_property
    def has_too_many_multiples(self) -> bool:
        """Whether its ``multipleOf`` numbers need too many states."""
        return has_too_many_multiples(self.root)

    @cached_property
    def used(self) -> set[int] | None:
        """The ids of the schemas that values are held to; ``None`` if it may be any of them, as
        some have names of their own."""
        if has_id(self.root):
            return None
        found: set[int] = set()

        def below(schema: Schema) -> Iterator[Schema]:
            if id(schema) in found:
                return
            found.add(id(schema))
            yield from subschemas({k: item for k, item in schema.items() if k not in DEFINITIONS})
            others = (referred(schema, self.root), *(schema.get(key) for key in TWINS))
            yield from (item for item in others if isinstance(item, Mapping))

        for schema in walk(self.root, below):
            reference = schema.get("$ref")
            is_inside = isinstance(reference, str) and reference.startswith("#")
            if is_inside and referred(schema, self.root) is None:
                return None
        return found

    def keeps_alternatives(self, schema: Schema) -> bool:
        """Return whether the ``oneOf`` of a schema must stay: its alternatives are told apart
        later, or references lead into some."""
        return self._forms.discriminator(schema) is not None or self._leads_into_alternatives

    @cached_property
    def _forms(self) -> Forms:
        return Forms(self.root)

    @cached_property
    def _leads_into_alternatives(self) -> bool:
        parts = (part for part in walk(self.root, members) if isinstance(part, Mapping))
        references = (part.get("$ref") for part in parts)
        return any(isinstance(found, str) and "/oneOf/" in found for found in references)

"""What the models of a request's JSON body have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError
from pydantic_core.core_schema import ErrorType


def _refusing(kinds: type | tuple[type, ...], error: ErrorType) -> BeforeValidator:
    """Return a validator that refuses what pydantic would read as a value of another kind, such as
    ``true`` as 1."""

    def check(value: Any) -> Any:
        if isinstance(value, kinds):
            raise PydanticKnownError(error)
        return value

    return BeforeValidator(check)


_NO_INTEGER = _refusing((bool, str), "int_type")
Integer = Annotated[int, _NO_INTEGER]
OptionalInteger = Annotated[int | None, _NO_INTEGER]
"""Unlike of ``Integer | None``, the schema of this one tells ``ge`` and ``le`` of its field."""

Number = Annotated[float, _refusing((bool, str), "float_type")]
Truth = Annotated[bool, _refusing(str, "bool_type")]
"""True or false; ``"false"`` is neither."""


def at_most(number: int) -> BeforeValidator:
    """Return a validator that refuses an object with more members, or an array with more items,
    before any is validated: an error for each would take long to make, and so would the items."""

    def check(value: Any) -> Any:
        if isinstance(value, Mapping) and len(value) > number:
            reason = "an object of at most {number} members is expected"
            raise PydanticCustomError("too_many_members", reason, {"number": number})
        if isinstance(value, list) and len(value) > number:
            context = {"field_type": "Tuple", "max_length": number, "actual_length": len(value)}
            raise PydanticKnownError("too_long", context)
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """A part of a request; undocumented fields are kept, so that they can be named."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Documented fields that could not change an answer."""

    def undocumented_inside(self) -> set[str]:
        """Return the paths of undocumented fields in the parts of this one, without indices.

        Clients send back answers with all the fields their library knows, so empty ones do not
        count.
        """
        found: set[str] = set()
        _add_undocumented(self, "", found)
        return found

    def unread_fields(self) -> dict[str, Any]:
        """Return the undocumented fields that are not empty."""
        return {
            name: value
            for name, value in (self.model_extra or {}).items()
            if name not in self.without_effect and without_nulls(value) not in _NOTHING
        }


class ClosedBody(BaseModel):
    """A part of a request in which undocumented fields are refused, and ``null`` means that a field
    is not set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, data: Any) -> Any:
        """Return the fields without the undocumented ones, except for the first: one error is
        enough, however many there are."""
        found = without_nulls(data)
        if not isinstance(found, dict):
            return found
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next((name for name in found if name not in known), None)
        return {name: item for name, item in found.items() if name in known or name == first}


_NOTHING: tuple[Any, ...] = (None, "", [], {})


def without_nulls(value: Any) -> Any:
    """Return an object without the fields that are ``null``; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


def _add_undocumented(body: Body, where: str, found: set[str]) -> None:
    for name, value in vars(body).items():
        if value is None or isinstance(value, str):  # nearly all: to ask for a model takes longer
            continue
        parts = (value,) if isinstance(value, Body) else value
        if not isinstance(parts, tuple) or not parts or not isinstance(parts[0], Body):
            continue
        inside = f"{where}{name}."
        for part in parts:
            if part.model_extra:
                found.update(inside + field for field in part.unread_fields())
            _add_undocumented(part, inside, found)

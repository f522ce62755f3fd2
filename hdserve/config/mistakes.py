"""What is wrong with a configuration, in its author's words: one line for each mistake."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

Location = tuple[int | str, ...]
"""Keys of mappings and indices of lists, from the outermost in."""

LineOf = Callable[[Location], int | None]
"""Finds the line of a location in a file, from 1 on."""

_MAX_SHOWN_CHARACTERS = 80

_KINDS: Mapping[str, str] = {
    "bool": "true or false",
    "dict": "a mapping",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "mapping": "a mapping",
    "model": "a mapping",
    "path": "a path",
    "string": "a text",
    "tuple": "a list",
}
"""The expected value, by the beginning of the name that pydantic has for the error."""

_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}

_EMPTY: Mapping[str, str] = {
    "string_too_short": "must not be empty",
    "too_short": "the list must not be empty",
}

_KIND_ERRORS = ("_type", "_parsing", "_from_float", "_parsing_size")

ELSEWHERE: Mapping[str, str] = {
    "default_chat_template_kwargs": "defaults.chat_template_kwargs",
    "enable_prefix_caching": "engine.prefix_caching",
    "enforce_eager": "engine.compile",
    "gpu_memory_utilization": "engine.kv_cache_tokens",
    "max_num_batched_tokens": "engine.prefill_chunk_tokens",
    "max_num_seqs": "engine.max_num_sequences",
    "override_generation_config": "defaults",
    "served_model_name": "name",
    "speculative_config": "drafting",
}
"""Keys of a model, by vLLM's name of what is nearest to them."""


WHOLE = "configuration"
"""The place of a mistake that is in no single value."""


class Mistakes(ValueError):
    """Mistakes in the combination of values that are valid individually.

    Args:
        found: where each mistake is, relative to the validated value, and what it is.
    """

    def __init__(self, found: Iterable[tuple[Location, str]]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(text for _, text in self.found))


def nowhere(_location: Location) -> None:
    """Find no line, since the configuration is not from a file."""


def place_of(location: Location, line_of: LineOf) -> str:
    """Return the beginning of a mistake's line: its place."""
    where = ".".join(str(part) for part in location) or WHOLE
    line = line_of(location)
    return where if line is None else f"line {line}, {where}"


def describe_errors(
    model: type[BaseModel], error: ValidationError, line_of: LineOf = nowhere
) -> Iterator[str]:
    """Yield one line per mistake: where it is and what is expected there; for an unknown key the
    nearest known one and all of them.  They are in the order of the file, where there is one.

    Args:
        line_of: of the file that is described.
    """
    items = error.errors(include_url=False)
    locations = [item["loc"] for item in items]
    found: dict[Location, list[tuple[Location, str]]] = {}
    for item in items:
        if item["type"] == "too_short" and _has_errors_inside(item["loc"], locations):
            continue  # it is too short only because its items are wrong
        location, annotation = _field_of(model, item["loc"])
        several = item.get("ctx", {}).get("error")
        if isinstance(several, Mistakes):
            found[location] = [((*location, *below), text) for below, text in several.found]
        else:
            found[location] = [(location, _reason(model, item, annotation))]
    told = [
        (line_of(location) or 0, f"{place_of(location, line_of)}: {text}")
        for location, text in chain.from_iterable(found.values())
    ]
    yield from (text for _, text in sorted(told, key=itemgetter(0)))


def _reason(model: type[BaseModel], item: ErrorDetails, annotation: Any) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(str(item["loc"][-1]), _model_at(model, item["loc"][:-1]))
    if kind == "missing":
        return "is missing"
    if kind == "value_error" and not _is_choice(annotation):
        return str(context["error"])
    if context.get("min_length") == 1 and kind in _EMPTY:
        return _EMPTY[kind]
    expected, found = _expected(kind, context, annotation), item["input"]
    if not expected:
        return item["msg"]
    told = f"{expected} is expected"
    if not _holds(annotation, SecretStr):
        told += f", not {_shown(found)}"
    if kind == "string_type" and not isinstance(found, dict | list | None):
        told += "; in quotes it is one"
    return told


def _expected(kind: str, context: Mapping[str, Any], annotation: Any) -> str:
    if _is_choice(annotation):
        *most, last = _choices(annotation)
        return f"{', '.join(most)} or {last}" if most else last
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{words} {context[name]:.9g}"
    if kind == "finite_number":
        return "a finite number"
    is_of_kind = kind.endswith(_KIND_ERRORS)
    return _KINDS.get(kind.split("_")[0], "") if is_of_kind else ""


def _unknown_key(key: str, model: type[BaseModel]) -> str:
    known = sorted(model.model_fields)
    if not known:
        return "unknown key; there are none here"
    near = [*_below(model, key), *_elsewhere(model, key)]
    near += difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown key; {hint}known keys: {', '.join(known)}"


def _below(model: type[BaseModel], key: str) -> Iterator[str]:
    """Yield the sections of ``model`` that have a key of that name, with it."""
    for name, field in model.model_fields.items():
        for section in _models_in(field.annotation):
            if key in section.model_fields and get_origin(field.annotation) is not tuple:
                yield f"{name}.{key}"


def _elsewhere(model: type[BaseModel], key: str) -> Iterator[str]:
    """Yield the names in ``model`` for another server's ``key``."""
    name = ELSEWHERE.get(key.replace("-", "_"), "")
    if name.split(".")[0] in model.model_fields:
        yield name


def _shown(value: Any) -> str:
    """Return the value found, as a message shows it."""
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    shown = repr(value) if isinstance(value, str) else str(value)
    is_long = len(shown) > _MAX_SHOWN_CHARACTERS
    return f"{shown[:_MAX_SHOWN_CHARACTERS]}..." if is_long else shown


def _is_choice(annotation: Any) -> bool:
    """Return whether it is one of a few words."""
    return any(get_origin(kind) is Literal for kind in kinds_of(annotation))


def _choices(annotation: Any) -> list[str]:
    found: list[str] = []
    for kind in kinds_of(annotation):
        if get_origin(kind) is Literal:
            found += map(str, get_args(kind))
        elif kind is bool:
            found += ["true", "false"]
        elif kind is type(None):
            found.append("null")
    return found


def _holds(annotation: Any, kind: type) -> bool:
    return annotation is kind or any(_holds(part, kind) for part in get_args(annotation))


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the one annotation."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _has_errors_inside(location: Location, locations: Iterable[Location]) -> bool:
    size = len(location)
    return any(other[:size] == location and len(other) > size for other in locations)


def _field_of(model: type[BaseModel], location: Location) -> tuple[Location, Any]:
    """Return the location without what pydantic adds for union members, and the annotation of the
    field there, ``None`` if there is none."""
    for size in (len(location), len(location) - 1):
        if size > 0:
            owner, name = _model_at(model, location[: size - 1]), location[size - 1]
            if isinstance(name, str) and name in owner.model_fields:
                annotation = owner.model_fields[name].annotation
                if size == len(location) or _is_choice(annotation):
                    return location[:size], annotation
    return location, None


def _model_at(model: type[BaseModel], location: Location) -> type[BaseModel]:
    """Return the model class that validates the value at ``location`` below ``model``."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)

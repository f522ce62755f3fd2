"""Alternatives are told from each other by types, values and the properties that they need."""

from __future__ import annotations

from typing import Any

import pytest

from hdserve.schema.overlap import Comparison
from tests.deployments.parsers.work import counted_calls

TEXT = {"type": "string"}


def record(**properties: Any) -> dict[str, Any]:
    """An object that needs its properties."""
    return {"type": "object", "properties": properties, "required": [*properties]}


ROOT: dict[str, Any] = {
    "$defs": {
        "a": record(kind={"const": "a"}),
        "b": record(kind={"const": "b"}),
        "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
    }
}
A, B, TREE = ({"$ref": f"#/$defs/{name}"} for name in ("a", "b", "tree"))

APART: list[list[Any]] = [
    [TEXT],
    [TEXT, {"type": "integer"}, {"type": ["null", "boolean"]}],
    [{"const": "a"}, {"const": "b"}, {"enum": [1, None, True]}],
    [{"type": "number", "const": 1}, {"const": 2}],
    [{"const": True}, {"const": 1}],
    [{"const": str(index)} for index in range(2000)],
    [False, TEXT, False],
    [A, B, {"type": "array"}],
    [{"allOf": [A], "title": "t"}, {"anyOf": [B, TEXT]}],
    [record(a=TEXT), record(a={"type": "null"}, b=TEXT)],
    [record(a=TEXT), {**record(b=TEXT), "additionalProperties": False}],
    [record(a=TEXT), {"properties": {"a": {"type": "null"}}}],
    [record(a=record(b={"const": 1})), record(a=record(b={"const": 2}))],
]


@pytest.mark.parametrize("schemas", APART, ids=lambda found: str(found)[:60])
def test_these_exclude_each_other(schemas: list[Any]) -> None:
    assert Comparison(ROOT).exclude_each_other(schemas)


OVERLAPPING: list[list[Any]] = [
    [TEXT, TEXT],
    [TEXT, True],
    [TEXT, {}],
    [{"type": "integer"}, {"type": "number"}],
    [{"const": 1}, {"const": 1.0}],
    [{"const": "a"}, {"enum": ["b", "a"]}],
    [{"const": [1]}, {"const": [2]}],
    [A, A],
    [TREE, {"type": "null"}],
    [TREE, TEXT],
    [record(a=TEXT), record(b={"type": "null"})],
    [{"properties": {"a": {"const": kind}}, "required": ["a"]} for kind in "xy"],
    [record(a=TEXT), {**record(b=TEXT), "additionalProperties": False, "patternProperties": {}}],
]


@pytest.mark.parametrize("schemas", OVERLAPPING, ids=lambda found: str(found)[:60])
def test_of_these_nothing_is_certain(schemas: list[Any]) -> None:
    assert not Comparison(ROOT).exclude_each_other(schemas)


def test_comparing_takes_no_long() -> None:
    """However many there are that differ in nothing."""
    forms: list[Any] = [{"anyOf": [{"anyOf": [{}] * 50}] * 50}] * 1000
    assert not Comparison({}).exclude_each_other(forms)


def test_types_of_values_are_found_once() -> None:
    """However many other schemas the values are compared with."""
    many = {"enum": [str(number) for number in range(1000)]}
    with counted_calls() as calls:
        assert not Comparison({}).exclude_each_other([many, *[{"type": "null"}] * 2000])
    assert calls["_are_apart"] > 100
    assert calls["<setcomp>"] < 10


def test_what_objects_need_alike_is_compared_once() -> None:
    """Else a few levels of it would use up all comparisons before what tells them apart."""
    data = TEXT
    for _ in range(3):
        data = record(a=data, b=data, c=data)
    forms = [record(data=data, n={"const": number}) for number in range(3)]
    assert Comparison({}).exclude_each_other(forms)


def test_what_objects_need_is_found_once() -> None:
    """However many other schemas they are compared with."""
    names = [str(number) for number in range(100)]
    wide = {**record(a={"const": "x"}), "required": ["a", *names]}
    forms = [record(a={"type": "number"}) for _ in range(250)]
    with counted_calls() as calls:
        assert not Comparison({}).exclude_each_other([wide, *forms])
    assert calls["_are_objects_apart"] > 200
    assert calls["required_by"] <= 1 + len(forms)

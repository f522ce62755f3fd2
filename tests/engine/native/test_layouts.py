"""What Python tells C++ has the layout that C++ reads."""

from __future__ import annotations

import ctypes
import inspect
import re
from collections.abc import Callable
from typing import Any

import numba
import pytest

from hdserve.engine.kernels.amx_attention import attend_with_amx
from hdserve.engine.kernels.attention import attend
from hdserve.engine.kernels.bf16_dot_attention import attend_by_bf16_dot
from hdserve.engine.kernels.linear import multiply_at
from hdserve.engine.kernels.prepacked_linear import multiply_prepacked_at
from hdserve.engine.native import operators

SOURCE = re.sub(r"//.*", "", operators._SOURCE.read_text(encoding="utf-8"))

NUMBA_TYPES = {"int64_t": numba.int64, "double": numba.float64}


def fields_of(struct: str) -> list[tuple[str, Any]]:
    """Names and types of the fields of a structure, in order."""
    found = re.search(rf"struct {struct} {{(.*?)}};", SOURCE, re.DOTALL)
    assert found is not None
    fields = []
    for declaration in filter(None, map(str.strip, found[1].split(";"))):
        parts = re.fullmatch(r"(?:const )?(\w+) \(?(\*?)(\w+)\)?(?:\[6\])?", declaration)
        assert parts is not None, declaration
        kind, star, name = parts.groups()
        is_number = kind == "int64_t" and not star
        fields.append((name, ctypes.c_int64 if is_number else ctypes.c_void_p))
    return fields


def parameters_of(alias: str) -> list[list[str]]:
    """Types and names of the parameters of a pointer to a function."""
    found = re.search(rf"using {alias} = void \(\*\)\((.*?)\);", SOURCE, re.DOTALL)
    assert found is not None
    return [each.split() for each in found[1].split(",")]


@pytest.mark.parametrize(
    ("struct", "layout"), [("Kernels", operators._Kernels), ("Step", operators._Step)]
)
def test_structures(struct: str, layout: type[ctypes.Structure]) -> None:
    assert fields_of(struct) == [(field[0], field[1]) for field in layout._fields_]


@pytest.mark.parametrize(
    ("alias", "kernel", "signature"),
    [
        ("Multiply", multiply_at, operators._MULTIPLY),
        ("MultiplyPrepacked", multiply_prepacked_at, operators._MULTIPLY_PREPACKED),
        ("Attend", attend, operators._ATTEND),
        ("AttendBfloat16", attend_by_bf16_dot, operators._ATTEND_BFLOAT16),
        ("AttendBfloat16", attend_with_amx, operators._ATTEND_BFLOAT16),
    ],
)
def test_kernels(alias: str, kernel: Callable[..., None], signature: Any) -> None:
    parameters = parameters_of(alias)
    assert [NUMBA_TYPES[kind] for kind, _ in parameters] == list(signature.args)
    short = [re.sub("_(at|item)$", "", name) for name in inspect.signature(kernel).parameters]
    assert [name for _, name in parameters] == short

"""Compiled code calls the functions of ``operators.cpp``, as they are."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

from hdserve.engine.native import operators
from hdserve.engine.native.declarations import declarations

SOURCE = operators._SOURCE.read_text(encoding="utf-8")


def defined() -> dict[str, list[str]]:
    """The types of the parameters of each such function, by its name."""
    functions = re.findall(r'extern "C" AOTITorchError (\w+)\((.*?)\) {', SOURCE, re.DOTALL)
    return {name: [*map(type_of, parameters.split(","))] for name, parameters in functions}


def type_of(parameter: str) -> str:
    """That of ``type name`` or ``type *name``."""
    *words, name = parameter.replace("Handle", "AtenTensorHandle").split()
    return " ".join(words) + "*" * name.startswith("*")


def test_each_is_defined_with_these_types() -> None:
    declared = {}
    for operator, (declaration,) in declarations().items():
        parts = re.fullmatch(r"AOTITorchError (\w+)\((.*)\)", declaration)
        assert parts is not None
        declared[parts[1]] = parts[2].split(", ")
        assert parts[1] == f"aoti_torch_cpu_{operator.split('.')[1]}"
    assert declared == defined()


def test_every_operator_with_native_code_is_declared() -> None:
    """The compiler looks for the operators themselves."""
    names = re.findall(r'library\.impl\("(\w+)"', SOURCE)
    assert len(names) == len(declarations())
    for name in names:
        assert getattr(torch.ops.hdserve, name).default in declarations()
    assert torch.ops.aten.add.Tensor not in declarations()


def test_they_are_part_of_the_key_of_kept_code() -> None:
    """What cannot be pickled would have the code compiled at each start."""
    copy = pickle.loads(pickle.dumps(declarations()))
    assert copy == declarations()
    assert torch.ops.hdserve.packed_attention.default in copy


@pytest.mark.parametrize("name", ["packed_attention", "prepacked_linear"])
def test_none_is_declared_for_python(name: str) -> None:
    assert getattr(torch.ops.hdserve, f"{name}_in_python").default not in declarations()

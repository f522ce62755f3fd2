"""The C functions that compiled code calls for our operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

_OPERATORS: Final = (
    *("skinny_linear", "prepacked_linear", "two_prepacked_linears", "three_prepacked_linears"),
    "packed_attention",
)

_C_TYPES: Final[Mapping[str, str]] = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "const AtenTensorHandle*",
    "int": "int64_t",
    "Optional[int]": "const int64_t*",
    "Optional[float]": "const double*",
}
"""By the types that operators take."""


class Declarations(dict[str, list[str]]):
    """The functions of ``operators.cpp`` that compiled code calls for our operators, declared in C.

    PyTorch's compiler looks for operators, which cannot be part of the key under which it keeps its
    code; their names can.
    """

    def __contains__(self, operator: object) -> bool:
        return super().__contains__(str(operator))


def declarations() -> Declarations:
    """Those of all operators, by their names."""
    found = torch.ops.hdserve
    operators = [getattr(found, name).default for name in _OPERATORS]
    return Declarations({str(operator): [_declaration(operator)] for operator in operators})


def _declaration(operator: torch._ops.OpOverload) -> str:
    schema = operator._schema
    types = [_C_TYPES[str(each.real_type)] for each in schema.arguments]
    types += ["AtenTensorHandle*"] * len(schema.returns)
    name = schema.name.removeprefix("hdserve::")
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join(types)})"

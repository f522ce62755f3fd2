"""Operators of PyTorch that are functions of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensors = torch.Tensor | list[torch.Tensor]


def define_operator(
    name: str,
    signature: str,
    function: Callable[..., Tensors],
    like: Callable[..., Tensors],
) -> None:
    """Define ``hdserve::name``, which compiled models call, and ``hdserve::name_in_python``, which
    stays a function of Python also where ``name`` has code of its own for a device
    (``native/operators.cpp``).

    Args:
        like: gives tensors of the shapes, dtypes and strides of what ``function`` gives.
    """
    for each in (f"hdserve::{name}", f"hdserve::{name}_in_python"):
        torch.library.define(each, signature)
        torch.library.impl(each, "default", function)
        torch.library.register_fake(each, like)


def like_products(rows: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """What an operator gives that multiplies ``rows`` by ``weight [num_outputs, num_inputs]``."""
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))

"""PyTorch operators that are Python functions."""

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
    remains the Python function even if ``name`` has native code for a device
    (``native/operators.cpp``).

    Args:
        like: gives tensors of the same shapes, dtypes and strides as ``function``.
    """
    for each in (f"hdserve::{name}", f"hdserve::{name}_in_python"):
        torch.library.define(each, signature)
        torch.library.impl(each, "default", function)
        torch.library.register_fake(each, like)


def like_products(rows: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """The result's shape, where ``rows`` are multiplied by ``weight [num_outputs, num_inputs]``."""
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))

"""Tensors on a CPU as the arrays that compiled code reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory as an array; bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array

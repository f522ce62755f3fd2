"""Kernels for NVIDIA GPUs, written in Triton, which comes with PyTorch's builds for them.

The modules beside this one import Triton, so they are imported where :func:`are_available`.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch

logger = logging.getLogger(__name__)


@cache
def are_available(device: torch.device) -> bool:
    """Whether ``device`` runs them, which is tried with the smallest; else PyTorch's operators have
    to do."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    try:
        from hdserve.engine.gpu_kernels.top import find_largest

        return bool(find_largest(torch.ones((1, 1), device=device), 1)[0].item() == 1.0)
    except Exception as error:  # of a compiler, any
        logger.warning("%s runs no kernels of hdserve's own: %s", device, error)
        return False

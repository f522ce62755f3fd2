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
    """Whether ``device`` runs all of them, which is tried; else PyTorch's operators are used."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    try:
        from hdserve.engine.gpu_kernels.trial import do_all_run

        if do_all_run(device):
            return True
        reason = "they give wrong results"
    except Exception as error:  # compilers raise anything
        reason = str(error)
    logger.warning("%s runs none of hdserve's own kernels: %s", device, reason)
    return False

"""What the tests of the kernels for GPUs need."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

HAS_GPU = torch.cuda.is_available() and find_spec("triton") is not None

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch finds no CUDA device, or there is no Triton"),
    pytest.mark.timeout(600),
]

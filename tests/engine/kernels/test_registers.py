"""The kernels as compiled for processors with fewer and shorter registers than this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hdserve.engine.kernels.registers import NUM_LANES

_AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2"
_KERNELS = Path(__file__).parent
_TESTS = [_KERNELS / "test_linear.py", _KERNELS / "test_vectors.py"]
_TESTS += [_KERNELS.parent / "test_tree_attention.py", _KERNELS.parent / "test_sampler.py"]


@pytest.mark.slow
@pytest.mark.skipif(NUM_LANES != 16, reason="this processor has none to leave unused")
def test_kernels_do_without_avx512(tmp_path: Path) -> None:
    """What they give is right with vectors of eight, and the same in any company."""
    settings = {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": _AVX2,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, _TESTS)]
    finished = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=550, check=False
    )
    assert finished.returncode == 0, finished.stdout[-2000:]

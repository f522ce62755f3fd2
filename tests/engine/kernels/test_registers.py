"""The kernels as compiled for processors with fewer and shorter registers than this one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hdserve.databases.kernel_cache import BASELINES
from hdserve.engine.attention.cpu_tree import can_attend_with_amx
from hdserve.engine.kernels.registers import (
    HAS_AMX,
    HAS_AVX2_ALONE,
    HAS_AVX512_BF16,
    NUM_LANES,
)

_PROCESSOR = Path("/proc/cpuinfo")
_AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl"
_BF16_DOT = f"{_AVX512},+avx512bf16"
_KERNELS = Path(__file__).parent
_TESTS = [_KERNELS / "test_linear.py", _KERNELS / "test_vectors.py"]
_ENGINE = _KERNELS.parent
_TESTS += [_ENGINE / "sampling" / "test_sampler.py", _ENGINE / "sampling" / "test_topk.py"]
_TESTS += [_ENGINE / "attention" / "test_cpu_tree.py", _ENGINE / "linear" / "test_layers.py"]


@pytest.mark.skipif(
    "NUMBA_CPU_FEATURES" in os.environ or not _PROCESSOR.exists(),
    reason="nothing else says what the processor has",
)
def test_what_the_processor_has_is_seen() -> None:
    """So that no test is skipped for the want of it."""
    has = {*_PROCESSOR.read_text().split()}
    assert (NUM_LANES == 16) is ("avx512f" in has)
    assert HAS_AVX2_ALONE is ({"avx2", "fma"} <= has and "avx512f" not in has)
    assert HAS_AVX512_BF16 is ({"avx512f", "avx512_bf16"} <= has)
    has_amx = {"avx512_bf16", "amx_tile", "amx_bf16"} <= has
    assert HAS_AMX is has_amx
    assert can_attend_with_amx() is has_amx


_SEEN = """
from hdserve.engine.kernels.registers import HAS_AVX2_ALONE, NUM_LANES
assert (HAS_AVX2_ALONE, NUM_LANES) == (True, 8)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its baseline has no AVX2")
def test_a_baseline_has_what_its_code_needs() -> None:
    """Images are built for it by name, without features."""
    settings = {"NUMBA_CPU_NAME": BASELINES["x86_64"][0], "NUMBA_CPU_FEATURES": ""}
    subprocess.run([sys.executable, "-c", _SEEN], env=os.environ | settings, check=True)


@pytest.mark.slow
@pytest.mark.skipif(NUM_LANES != 16, reason="this processor has none to leave unused")
@pytest.mark.parametrize(
    ("processor", "features"),
    [("haswell", _AVX2), ("skylake-avx512", _AVX512), ("cooperlake", _BF16_DOT)],
    ids=["vectors of eight", "AVX-512 without BF16", "AVX-512 BF16 but no AMX"],
)
def test_kernels_do_without(processor: str, features: str, tmp_path: Path) -> None:
    """What they give is right, and the same in any company."""
    if features == _BF16_DOT and not HAS_AVX512_BF16:
        pytest.skip("the processor has no AVX-512 BF16")
    settings = {
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, _TESTS)]
    finished = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=550, check=False
    )
    assert finished.returncode == 0, finished.stdout[-2000:]

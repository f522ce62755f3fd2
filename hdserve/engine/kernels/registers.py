"""What kernels are compiled for: the width and the number of the processor's vector registers."""

from __future__ import annotations

from typing import Final

from numba.core.registry import cpu_target

from hdserve.databases.kernel_cache import BASELINES


def _features() -> frozenset[str]:
    """The features of the processor that numba compiles for, by LLVM's names; of a baseline, which
    is named without any, those that a processor needs to run code for it."""
    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    baseline, needed = BASELINES.get(triple.split("-")[0], ("", frozenset[str]()))
    own = needed if name == baseline else features.split(",")
    return frozenset(feature[1:] for feature in own if feature[:1] == "+")


HAS_AVX512: Final = "avx512f" in _features()
"""32 registers of 512 bits, elsewhere 16 of 256 (AVX2), or 32 of 128 (ARM)."""

HAS_AVX2_ALONE: Final = {"avx2", "fma"} <= _features() and not HAS_AVX512
"""Vectors have 256 bits, in 16 registers."""

HAS_AVX512_BF16: Final = HAS_AVX512 and "avx512bf16" in _features()
"""The processor has products of bfloat16 vectors that are summed in pairs (AVX-512 BF16)."""

HAS_AMX: Final = HAS_AVX512_BF16 and {"amx-tile", "amx-bf16"} <= _features()
"""The processor has products of bfloat16 matrices (AMX)."""

NUM_LANES: Final = 16 if HAS_AVX512 else 8
"""Float32 numbers of a vector, which is one register, or two where registers are short (ARM)."""

NUM_ROWS: Final = 4 if HAS_AVX512 else 3
"""Sums of this many rows by four columns stay in registers, with a vector of each row and one of a
column: 21 of 32 registers, all of 16, or all of 32 in twos."""

"""What the processor has that kernels are compiled for: how wide its vectors are, and how many."""

from __future__ import annotations

from typing import Final

from numba.core.registry import cpu_target


def _features() -> frozenset[str]:
    """The features of the processor that numba compiles for, as LLVM calls them."""
    _triple, _name, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(feature[1:] for feature in features.split(",") if feature[:1] == "+")


HAS_AVX512: Final = "avx512f" in _features()
"""32 registers of 512 bits, elsewhere 16 of 256 (AVX2), or 32 of 128 (ARM)."""

HAS_PAIRS: Final = HAS_AVX512 and "avx512bf16" in _features()
"""Products of vectors of bfloat16 that are summed in pairs."""

HAS_TILES: Final = HAS_PAIRS and {"amx-tile", "amx-bf16"} <= _features()
"""Products of matrices of bfloat16."""

NUM_LANES: Final = 16 if HAS_AVX512 else 8
"""Float32 of a vector, which is one register, or two where they are as short as ARM's."""

NUM_ROWS: Final = 4 if HAS_AVX512 else 3
"""So many rows by four columns of sums stay in registers, with a vector of each row and one of a
column: 21 of 32, all of 16, or all of 32 by twos."""

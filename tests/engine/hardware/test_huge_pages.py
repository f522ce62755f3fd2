"""Tests of memory in huge pages."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from hdserve.engine.hardware.huge_pages import empty_in_huge_pages

MAPPINGS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def mapping_of(address: int) -> tuple[str, list[str]]:
    """The permissions and flags of the memory at an address."""
    permissions = None
    for line in MAPPINGS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
            has_address = int(bounds[1], 16) <= address < int(bounds[2], 16)
            permissions = bounds[3] if has_address else None
        elif permissions and line.startswith("VmFlags:"):
            return permissions, line.split()[1:]
    raise AssertionError("no memory at this address")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16])
def test_a_tensor_keeps_what_is_written_to_it(dtype: torch.dtype) -> None:
    tensors = [empty_in_huge_pages((3, 5, 7), dtype).fill_(number) for number in range(4)]
    view = tensors.pop()[1]
    del tensors
    gc.collect()
    other = empty_in_huge_pages((3, 5, 7), dtype).fill_(9)
    assert other.shape == (3, 5, 7)
    assert other.dtype == view.dtype == dtype
    assert view.eq(3).all()


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no huge pages")
def test_the_kernel_may_back_it_with_huge_pages() -> None:
    tensor = empty_in_huge_pages((1 << 22,), torch.float32)
    permissions, flags = mapping_of(tensor.data_ptr())
    assert "hg" in flags
    assert permissions.endswith("p"), "shared memory gets none"

"""The largest entries by the kernel are those that torch finds."""

from __future__ import annotations

import pytest
import torch

from hdserve.engine.sampling.topk import argmax, topk

SHAPES = [(1, 7), (3, 50), (17, 8192), (2, 32000), (5, 8200), (40, 1024)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_as_torch(shape: tuple[int, int]) -> None:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(argmax(rows), rows.argmax(dim=-1))
    k = min(8, shape[1])
    values, indices = topk(rows, k)
    wanted = rows.topk(k, dim=-1)
    assert torch.equal(values, wanted.values)
    assert torch.equal(indices, wanted.indices)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_first_among_equals(shape: tuple[int, int]) -> None:
    """Few different values, so that every row has ties within blocks and across them."""
    rows = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(2)).float()
    first = [row.index(max(row)) for row in rows.tolist()]
    assert argmax(rows).tolist() == first
    values, indices = topk(rows, min(8, shape[1]))
    assert torch.equal(rows.gather(1, indices), values)
    assert all(len(set(row)) == len(row) for row in indices.tolist())


@pytest.mark.parametrize("num_values", [3, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_is_read_where_it_is(shape: tuple[int, int], num_values: int) -> None:
    """What is found is what is found of the same numbers in float32, ties too."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(-num_values, num_values, shape, generator=generator).bfloat16()
    rows[0, 0] = float("nan")
    for k in (1, min(8, shape[1])):
        values, indices = topk(rows, k)
        wanted_values, wanted_indices = topk(rows.float(), k)
        assert torch.equal(values, wanted_values)
        assert torch.equal(indices, wanted_indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_no_number_hides_none(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Wherever it stands beside the largest ones, by the kernel or without it."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(shape, generator=generator)
    rows[torch.rand(shape, generator=generator) < 0.4] = torch.nan
    rows[:, -1] = 9.0
    values, indices = topk(rows.to(dtype), 2)
    wanted = rows.nan_to_num(-torch.inf).topk(2)
    assert torch.equal(values, wanted.values)
    assert torch.equal(indices, wanted.indices)


def test_others_are_left_to_torch() -> None:
    rows = torch.randn(3, 200)
    for other in (rows.double(), rows[:, ::2]):
        assert torch.equal(argmax(other), other.argmax(dim=-1))
        assert torch.equal(topk(other, 4)[1], other.topk(4).indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("num_values", [2, 40])
def test_the_likeliest_is_the_first_among_equals_without_the_kernel(
    dtype: torch.dtype, num_values: int
) -> None:
    """Whatever ``k`` is, so that what is chosen does not depend on whether drafters asked."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, num_values, (60, 1000), generator=generator).to(dtype)[:, ::2]
    first = [row.index(max(row)) for row in rows.tolist()]
    for k in (1, 2, 8):
        values, indices = topk(rows, k)
        assert indices[:, 0].tolist() == first
        assert torch.equal(rows.gather(1, indices), values)
        assert torch.equal(values, rows.topk(k).values)
        assert all(len(set(row)) == k for row in indices.tolist())


def test_few_numbers_leave_the_rest_empty() -> None:
    rows = torch.full((1, 100), -torch.inf)
    rows[0, 70], rows[0, 99] = 1.0, 2.0
    values, indices = topk(rows, 3)
    assert values[0].tolist() == [2.0, 1.0, -torch.inf]
    assert indices[0].tolist() == [99, 70, 0]


def test_rows_without_a_number_give_some_index() -> None:
    """A model that overflowed must not stop other sequences."""
    rows = torch.full((16, 8192), float("nan"))
    rows[1] = -torch.inf
    found = argmax(rows)
    assert found.shape == (16,)
    assert ((found >= 0) & (found < 8192)).all()

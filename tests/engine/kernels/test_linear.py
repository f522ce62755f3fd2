"""Products of rows and weights, and that a row's do not depend on the other rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.databases.cache_lines import address_of
from hdserve.engine.kernels.linear import VECTORS_PER_BLOCK, multiply_at
from hdserve.engine.kernels.narrow_tiles import MAX_NARROW_ROWS
from hdserve.engine.kernels.prepacked_linear import INPUTS_PER_BLOCK, MANY_INPUTS_PER_BLOCK
from hdserve.engine.kernels.prepacked_tiles import MAX_ROWS, OUTPUTS_PER_BLOCK
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.linear.prepacked import prepacked_kernel
from hdserve.engine.linear.prepacked_weights import (
    inputs_per_word,
    places_of,
    prepack,
    unpack_weights,
)

needs_prepacked = pytest.mark.skipif(
    prepacked_kernel(torch.bfloat16) is None, reason="no kernel of this processor prepacks weights"
)
needs_prepacked_floats = pytest.mark.skipif(
    prepacked_kernel(torch.float32) is None, reason="no kernel of this processor prepacks float32"
)


def as_bfloat16(weights: np.ndarray) -> np.ndarray:
    return (weights.view(np.uint32) >> 16).astype(np.uint16)


def widened(numbers: np.ndarray) -> np.ndarray:
    """As float64, of bfloat16."""
    return (numbers.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def multiply(
    rows: np.ndarray, weights: np.ndarray, products: np.ndarray, first: int, stop: int
) -> None:
    addresses = (address_of(rows), address_of(weights), address_of(products))
    sizes = (*rows.shape, len(weights))
    multiply_at(*addresses, *sizes, int(weights.dtype == np.uint16), first, stop)


def product(rows: np.ndarray, weights: np.ndarray, parts: int = 1) -> np.ndarray:
    """In so many calls, of which each leaves the others' outputs alone."""
    products = np.full((len(rows), len(weights)), np.nan, np.float32)
    ends = [len(weights) // 4 * part // parts * 4 for part in range(parts + 1)]
    for first, stop in pairwise(ends):
        multiply(rows, weights, products, first, stop)
    return products


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 70),
    num_inputs=st.integers(1, 9).map(lambda number: 16 * number),
    num_outputs=st.integers(1, 30).map(lambda number: 4 * number),
    parts=st.integers(1, 3),
    is_bfloat16=st.booleans(),
    seed=st.integers(0, 9),
)
def test_products_are_right_and_rows_are_their_own(
    num_rows: int, num_inputs: int, num_outputs: int, parts: int, is_bfloat16: bool, seed: int
) -> None:
    """As NumPy has them; and any row gets the same bits alone, and in any number of calls."""
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((num_rows, num_inputs), np.float32)
    weights = generator.standard_normal((num_outputs, num_inputs), np.float32)
    stored = weights
    if is_bfloat16:
        stored = as_bfloat16(weights)
        weights = (stored.astype(np.uint32) << 16).view(np.float32)
    found = product(rows, stored, parts)
    wanted = rows.astype(np.float64) @ weights.astype(np.float64).T
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    row = int(generator.integers(num_rows))
    assert (product(rows[row : row + 1], stored)[0] == found[row]).all()
    few = rows[max(0, row - 6) : row + 1]
    assert (product(few, stored)[-1] == found[row]).all()


@pytest.mark.parametrize("num_blocks", [2.5, 3, 4.5])
@pytest.mark.parametrize("num_rows", [9, 12, 35])
@pytest.mark.parametrize("is_bfloat16", [False, True])
def test_long_rows_in_blocks_have_the_bits_of_whole_ones(
    num_blocks: float, num_rows: int, is_bfloat16: bool
) -> None:
    """Rows by themselves are multiplied in whole."""
    num_inputs = int(num_blocks * VECTORS_PER_BLOCK) * NUM_LANES
    generator = np.random.default_rng(num_rows)
    rows = generator.standard_normal((num_rows, num_inputs), np.float32)
    weights = generator.standard_normal((20, num_inputs), np.float32)
    if is_bfloat16:
        weights = as_bfloat16(weights)
    found = product(rows, weights, parts=2)
    for number, row in enumerate(rows):
        assert (product(row[None], weights)[0] == found[number]).all()


@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_nothing_is_written_beside_the_outputs(num_rows: int) -> None:
    weights = np.ones((12, 16), np.float32)
    products = np.full((num_rows, 12), -1.0, np.float32)
    multiply(np.ones((num_rows, 16), np.float32), weights, products, 4, 8)
    assert (products[:, 4:8] == 16.0).all()
    assert (products[:, :4] == -1.0).all()
    assert (products[:, 8:] == -1.0).all()


def bfloat16_product(
    rows: np.ndarray, weights: np.ndarray, bias: np.ndarray | None, parts: int, num_streams: int
) -> np.ndarray:
    """In so many calls, of weights prepacked into so many streams."""
    kernel, stored = prepacked_kernel(torch.bfloat16), prepacked(weights, num_streams)
    assert kernel is not None
    products = np.full((len(rows), len(weights)), 0x7FC0, np.uint16)
    arrays = (rows, stored, products if bias is None else bias, products)
    addresses = [address_of(array) for array in arrays]
    addresses[2] *= bias is not None
    ends = [len(stored) * part // parts for part in range(parts + 1)]
    for first, stop in pairwise(ends):
        kernel(*addresses, *rows.shape, len(weights), num_streams, first, stop)
    return products


def prepacked(weights: np.ndarray, num_streams: int) -> np.ndarray:
    found: np.ndarray = prepack(torch.from_numpy(weights.view(np.int16)), num_streams).numpy()
    return found


@needs_prepacked
@pytest.mark.parametrize("num_streams", [1, 2])
@settings(deadline=None)
@given(
    num_rows=st.integers(1, 70),
    num_inputs=st.integers(1, 5).map(lambda number: 32 * number),
    num_outputs=st.integers(OUTPUTS_PER_BLOCK, 5 * OUTPUTS_PER_BLOCK),
    parts=st.integers(1, 3),
    has_bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_products_of_bfloat16_are_right_and_rows_are_their_own(
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    parts: int,
    has_bias: bool,
    seed: int,
    num_streams: int,
) -> None:
    """Rounded to bfloat16; and any row gets the same bits alone, and in any number of calls."""
    generator = np.random.default_rng(seed)
    rows, weights, bias = (
        as_bfloat16(generator.standard_normal(shape, np.float32))
        for shape in ((num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,))
    )

    def product_of(rows: np.ndarray, parts: int = 1) -> np.ndarray:
        return bfloat16_product(rows, weights, bias if has_bias else None, parts, num_streams)

    found = product_of(rows, parts)
    wanted = widened(rows) @ widened(weights).T + has_bias * widened(bias)
    np.testing.assert_allclose(widened(found), wanted, rtol=2**-8, atol=1e-4 * num_inputs)
    row = int(generator.integers(num_rows))
    assert (product_of(rows[row : row + 1])[0] == found[row]).all()
    few = rows[max(0, row - 6) : row + 1]
    assert (product_of(few)[-1] == found[row]).all()


ROW_COUNTS = [*range(MAX_ROWS, MAX_NARROW_ROWS + 3), 257, 300, 520]
"""Of which each has tiles of its own, until there are panels."""

BOUNDARIES = {MAX_ROWS + 1, MAX_NARROW_ROWS, MAX_NARROW_ROWS + 1, 257}
INPUT_COUNTS = [INPUTS_PER_BLOCK, 2 * INPUTS_PER_BLOCK, 416, 2 * MANY_INPUTS_PER_BLOCK + 32]


def block_cases() -> Iterator[tuple[int, int, int]]:
    """Rows and streams in full, at the boundaries with all numbers of inputs, else in turn."""
    for number, num_rows in enumerate(ROW_COUNTS):
        for num_streams in (1, 2):
            turn = INPUT_COUNTS[(number + num_streams) % len(INPUT_COUNTS)]
            for num_inputs in INPUT_COUNTS if num_rows in BOUNDARIES else [turn]:
                yield num_rows, num_inputs, num_streams


@needs_prepacked
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_streams"), list(block_cases()))
def test_prepacked_weights_in_blocks_have_the_bits_of_whole_ones(
    num_rows: int, num_inputs: int, num_streams: int
) -> None:
    """Few rows are multiplied in whole, some more by narrow tiles where there are two streams and
    bfloat16 products; tiles of a panel are of two sizes."""
    generator = np.random.default_rng(num_rows)
    rows = as_bfloat16(generator.standard_normal((num_rows, num_inputs), np.float32))
    weights = as_bfloat16(generator.standard_normal((77, num_inputs), np.float32))

    def product_of(rows: np.ndarray, parts: int = 1) -> np.ndarray:
        return bfloat16_product(rows, weights, weights[:, 0].copy(), parts, num_streams)

    found = product_of(rows, parts=2)
    wanted = widened(rows) @ widened(weights).T + widened(weights[:, 0])
    np.testing.assert_allclose(widened(found), wanted, rtol=2**-8, atol=2e-2)
    for first in range(0, num_rows, MAX_ROWS - 1):
        few = slice(first, first + MAX_ROWS - 1)
        assert (product_of(rows[few]) == found[few]).all()


@settings(deadline=None)
@given(
    num_outputs=st.integers(OUTPUTS_PER_BLOCK, 4 * OUTPUTS_PER_BLOCK),
    num_inputs=st.integers(1, 40).map(lambda number: 2 * number),
    num_streams=st.integers(1, 2),
    dtype=st.sampled_from([torch.int16, torch.int32]),
)
def test_what_is_prepacked_has_every_weight_where_it_is_looked_for(
    num_outputs: int, num_inputs: int, num_streams: int, dtype: torch.dtype
) -> None:
    weights = torch.arange(num_outputs * num_inputs, dtype=dtype).view(num_outputs, num_inputs)
    found = prepack(weights, num_streams)
    blocks = found.unflatten(3, (OUTPUTS_PER_BLOCK // num_streams, inputs_per_word(dtype)))
    places = places_of(torch.arange(num_outputs), num_outputs).tolist()
    for output, found_at in enumerate(places):
        block = min(output // OUTPUTS_PER_BLOCK, len(blocks) - 1)
        first = min(block * OUTPUTS_PER_BLOCK, num_outputs - OUTPUTS_PER_BLOCK)
        for number, within in ((block, output - first), divmod(found_at, OUTPUTS_PER_BLOCK)):
            stream, place = divmod(within, OUTPUTS_PER_BLOCK // num_streams)
            assert torch.equal(blocks[number, stream, :, place].flatten(), weights[output])
    assert torch.equal(unpack_weights(found, num_outputs), weights)


@needs_prepacked
@pytest.mark.parametrize("num_inputs", [1 << 14, (1 << 14) + 32, 1 << 15])
def test_rows_for_which_there_is_no_room_are_multiplied_in_turns(num_inputs: int) -> None:
    """Rows are laid together or widened on the stack, which eight of 2 ** 14 inputs fill."""
    generator = np.random.default_rng(1)
    rows = as_bfloat16(generator.standard_normal((8, num_inputs), np.float32))
    weights = as_bfloat16(generator.standard_normal((64, num_inputs), np.float32))
    found = bfloat16_product(rows, weights, None, 1, num_streams=2)
    wanted = widened(rows) @ widened(weights).T
    np.testing.assert_allclose(widened(found), wanted, rtol=2**-8, atol=0.1)
    alone = bfloat16_product(rows[3:4], weights, None, 1, num_streams=2)
    assert (found[3:4] == alone).all()


@needs_prepacked
@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("num_rows", [5, 13, 18])
def test_prepacked_weights_write_nothing_beside_their_blocks(
    num_rows: int, num_streams: int
) -> None:
    num_outputs = 2 * OUTPUTS_PER_BLOCK + 13
    rows, weights = (as_bfloat16(np.ones((n, 32), np.float32)) for n in (num_rows, num_outputs))
    stored = prepacked(weights, num_streams)
    products = np.full((num_rows + 1, num_outputs), 7, np.uint16)
    addresses = (address_of(rows), address_of(stored), 0, address_of(products))
    kernel = prepacked_kernel(torch.bfloat16)
    assert kernel is not None
    kernel(*addresses, num_rows, 32, num_outputs, num_streams, 1, 2)
    second = slice(OUTPUTS_PER_BLOCK, 2 * OUTPUTS_PER_BLOCK)
    assert (widened(products[:num_rows, second]) == 32.0).all()
    products[:num_rows, second] = 7
    assert (products == 7).all()


def float32_product(
    rows: np.ndarray, weights: np.ndarray, bias: np.ndarray | None, parts: int, num_streams: int
) -> np.ndarray:
    """In so many calls, of prepacked weights."""
    kernel = prepacked_kernel(torch.float32)
    assert kernel is not None
    stored = prepack(torch.from_numpy(weights), num_streams).numpy()
    products = np.full((len(rows), len(weights)), np.nan, np.float32)
    bias_at = 0 if bias is None else address_of(bias)
    addresses = (address_of(rows), address_of(stored), bias_at, address_of(products))
    ends = [len(stored) * part // parts for part in range(parts + 1)]
    for first, stop in pairwise(ends):
        kernel(*addresses, *rows.shape, len(weights), num_streams, first, stop)
    return products


@needs_prepacked_floats
@settings(deadline=None)
@given(
    num_rows=st.integers(1, 70),
    num_inputs=st.integers(1, 20).map(lambda number: 16 * number),
    num_outputs=st.integers(OUTPUTS_PER_BLOCK, 5 * OUTPUTS_PER_BLOCK),
    parts=st.integers(1, 3),
    num_streams=st.integers(1, 2),
    has_bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_prepacked_products_of_float32_are_right_and_rows_are_their_own(
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    parts: int,
    num_streams: int,
    has_bias: bool,
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    rows, weights, bias = (
        generator.standard_normal(shape, np.float32)
        for shape in ((num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,))
    )

    def product_of(rows: np.ndarray, parts: int = 1) -> np.ndarray:
        return float32_product(rows, weights, bias if has_bias else None, parts, num_streams)

    found = product_of(rows, parts)
    wanted = rows.astype(np.float64) @ weights.astype(np.float64).T + has_bias * bias
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    row = int(generator.integers(num_rows))
    assert (product_of(rows[row : row + 1])[0] == found[row]).all()
    few = rows[max(0, row - 6) : row + 1]
    assert (product_of(few)[-1] == found[row]).all()


@needs_prepacked_floats
@pytest.mark.parametrize("num_rows", [6, 7, 8, 13, 251, 253, 300])
def test_panels_of_float32_have_the_bits_of_few_rows(num_rows: int) -> None:
    generator = np.random.default_rng(num_rows)
    rows = generator.standard_normal((num_rows, 160), np.float32)
    weights = generator.standard_normal((72, 160), np.float32)
    found = float32_product(rows, weights, weights[:, 0].copy(), 2, 2)
    for first in range(0, num_rows, 5):
        few = float32_product(rows[first : first + 5], weights, weights[:, 0].copy(), 1, 2)
        assert (few == found[first : first + 5]).all()

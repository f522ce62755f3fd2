"""The kernels for GPUs: `pytest -m gpu tests/engine/test_gpu_kernels.py`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hdserve.core import SamplingParams
from hdserve.engine import gpu_kernels
from hdserve.engine.batch.races import Race, races_on
from hdserve.engine.kernels.draw import NO_TOKEN
from hdserve.engine.sampling.sampler import choose, inverse_temperature
from hdserve.noise import position_key
from tests.engine.gpus import HAS_GPU, NEEDS_GPU

if HAS_GPU:
    from hdserve.engine.gpu_kernels.choices import find_and_draw
    from hdserve.engine.gpu_kernels.move import RowMover
    from hdserve.engine.gpu_kernels.multiply import RowProducts, can_multiply
    from hdserve.engine.gpu_kernels.store import store_rows

pytestmark = NEEDS_GPU

_NUM_OUTPUTS = [(4096,), (4096, 1024, 1024), (64, 128), (12288, 320), (64,), (352, 61, 8)]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def no_races(num_rows: int) -> torch.Tensor:
    return torch.zeros((2, num_rows), dtype=torch.int64, device="cuda")


def test_all_are_used() -> None:
    """Which the log says if not, and why."""
    assert gpu_kernels.are_available(torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("num_inputs", [1408, 352])
@pytest.mark.parametrize("numbers", _NUM_OUTPUTS, ids=str)
def test_products(
    numbers: tuple[int, ...], num_inputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    multiply = RowProducts(torch.device("cuda"))
    weights = [random(number, num_inputs, dtype=dtype) for number in numbers]
    biases = [random(number, dtype=dtype) if has_bias else None for number in numbers]
    for num_rows in (1, 2, 15, 16, 17, 64):
        rows = random(1, num_rows, num_inputs, dtype=dtype)
        assert can_multiply(weights)
        for _ in range(2):
            found = multiply(rows, weights, biases)
        for products, weight, bias in zip(found, weights, biases, strict=True):
            wanted = F.linear(
                rows.double(), weight.double(), None if bias is None else bias.double()
            )
            error = (products.double() - wanted).norm() / wanted.norm()
            assert error < (4e-3 if dtype == torch.bfloat16 else 5e-4)


@pytest.mark.parametrize("num_inputs", [4096, 704])
@pytest.mark.parametrize("number", [64, 352, 4096, 12288])
def test_what_a_row_gives_does_not_depend_on_the_others(number: int, num_inputs: int) -> None:
    """Bit for bit."""
    multiply = RowProducts(torch.device("cuda"))
    rows, weight = random(64, num_inputs), random(number, num_inputs)
    (all_of_them,) = multiply(rows, [weight], [None])
    for first, num_rows in ((0, 1), (5, 1), (7, 2), (20, 17), (3, 40)):
        (some,) = multiply(rows[first : first + num_rows], [weight], [None])
        assert torch.equal(some, all_of_them[first : first + num_rows])


def test_other_products_are_pytorchs() -> None:
    multiply = RowProducts(torch.device("cuda"))
    for num_rows, shape in ((65, (128, 128)), (3, (128, 100)), (0, (128, 128))):
        rows, weight = random(num_rows, shape[1]), random(*shape)
        (found,) = multiply(rows, [weight], [None])
        assert torch.equal(found, F.linear(rows, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("key_size", "value_size"), [(128, 128), (24, 16), (96, 128)])
def test_rows_are_stored(key_size: int, value_size: int, dtype: torch.dtype) -> None:
    """As :meth:`KVCache.write` says, of what is no number, too; and nothing else is written."""
    num_heads, num_rows = 5, 7
    keys = random(1, num_rows, num_heads, key_size, dtype=dtype).transpose(1, 2)
    values = random(1, num_rows, num_heads, value_size, dtype=dtype).transpose(1, 2)
    keys[0, 0, 0, 0], values[0, 1, 2, 3], values[0, 2, 4, 0] = torch.inf, torch.nan, -torch.inf
    rows = torch.tensor([5, 60, 2, 9, 11, 12, 0], device="cuda")
    own_keys = torch.zeros((2, 1, num_heads, 128, key_size), dtype=dtype, device="cuda")
    own_values = torch.zeros((2, 1, num_heads, 128, value_size), dtype=dtype, device="cuda")
    wanted_keys, wanted_values = own_keys.clone(), own_values.clone()
    store_rows(rows, keys, values, own_keys[1], own_values[1])
    is_number = values.isfinite()
    if dtype == torch.float16:
        stored_keys = keys.nan_to_num(0.0, 0.0, 0.0)
    else:
        stored_keys = keys.masked_fill(~is_number.all(dim=-1, keepdim=True), torch.nan)
    wanted_keys[1].index_copy_(2, rows, stored_keys)
    wanted_values[1].index_copy_(2, rows, values.where(is_number, 0.0))
    torch.testing.assert_close(own_keys, wanted_keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(own_values, wanted_values, rtol=0, atol=0)


@pytest.mark.parametrize("num_columns", [61, 2048, 32000, 151936])
def test_the_largest_are_found(num_columns: int) -> None:
    rows = random(33, num_columns)
    found = find_and_draw(rows, 8, no_races(33))
    values, columns = found[0, :, :8], found[1, :, :8].view(torch.int32).long()
    assert torch.equal(values, rows.float().topk(8).values)
    assert torch.equal(rows.float().gather(1, columns), values)
    assert torch.equal(columns[:, 0], rows.max(dim=-1).indices)
    assert all(len(set(row)) == 8 for row in columns.tolist())


def test_what_is_no_number_is_not_found() -> None:
    rows = torch.full((3, 5000), -torch.inf, device="cuda")
    rows[0, 3000], rows[0, 7] = 1.0, torch.nan
    rows[2, 4999], rows[2, 17] = torch.inf, torch.inf
    found = find_and_draw(rows, 4, no_races(3))
    assert found[0].tolist() == [
        [1.0] + [-torch.inf] * 3 + [0.0],
        [-torch.inf] * 4 + [0.0],
        [torch.inf] * 2 + [-torch.inf] * 2 + [0.0],
    ]
    assert found[1].view(torch.int32).tolist() == [
        [3000, 0, 0, 0, NO_TOKEN],
        [0, 0, 0, 0, NO_TOKEN],
        [17, 4999, 0, 0, NO_TOKEN],
    ]


def test_rows_are_moved() -> None:
    """Several times, with more of them and fewer."""
    device = torch.device("cuda")
    mover = RowMover(device)
    tensors = [random(3, 5, 640, size) for size in (128, 96)]
    moves = [(9, 7), (12, 8), (13, 9), (100, 20)]
    for some in (moves[:1], moves, moves * 5, moves[:2]):
        wanted = [stored.clone() for stored in tensors]
        for stored in wanted:
            for source, target in some:
                stored[:, :, target] = stored[:, :, source]
        mover(tensors, some)
        torch.cuda.synchronize()
        for found, expected in zip(tensors, wanted, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_columns", [61, 1024, 32000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_the_first_token_is_drawn(temperature: float, num_columns: int, dtype: torch.dtype) -> None:
    """What the definition draws, in float64 on a CPU."""
    rows = random(50, num_columns, dtype=dtype) * 3
    rows[3], rows[4, 5] = -torch.inf, torch.nan
    keys = [position_key(987654321987, position) for position in range(50)]
    params = SamplingParams(temperature=temperature)
    found = choose(rows, params, keys).tolist()
    known = rows.double().cpu().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    assert found == choose(known, params, keys).tolist()
    assert found[3] == NO_TOKEN
    assert [
        int(choose(rows[i : i + 1].float(), params, keys[i : i + 1])) for i in range(9)
    ] == found[:9]
    race = Race(keys, inverse_temperature(params))
    races = races_on(torch.device("cuda"), 50, [(slice(50), race)])
    races[1, 7:9] = 0
    some = find_and_draw(rows, 8, races)[1, :, 8].view(torch.int32).tolist()
    assert some == [*found[:7], NO_TOKEN, NO_TOKEN, *found[9:]]


def test_what_is_infinite_is_not_drawn() -> None:
    rows = random(2, 5000)
    rows[1, 4321] = torch.inf
    tokens = choose(rows, SamplingParams(), [1, 2]).tolist()
    assert tokens[0] != NO_TOKEN == tokens[1]

"""In how many streams weights are prepacked."""

from __future__ import annotations

import pytest

from hdserve.engine.kernels.registers import HAS_AVX512_BF16
from hdserve.engine.linear import prepacked_streams
from hdserve.engine.linear.prepacked_streams import pick_num_streams


@pytest.mark.parametrize(
    ("num_bytes", "is_faster", "num_streams"),
    [(1 << 26, True, 1), (1 + (1 << 26), True, 2), (1 + (1 << 26), False, 1)],
)
def test_two_where_weights_come_from_memory_and_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, is_faster: bool, num_streams: int
) -> None:
    monkeypatch.setattr(prepacked_streams, "HAS_AVX2_ALONE", False)
    monkeypatch.setattr(prepacked_streams, "_are_two_faster", lambda: is_faster)
    assert pick_num_streams(num_bytes) == num_streams


def test_always_two_for_tiles_that_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked_streams, "HAS_AVX2_ALONE", True)
    assert pick_num_streams(1) == 2


@pytest.mark.skipif(not HAS_AVX512_BF16, reason="the processor has no AVX-512 BF16")
def test_both_are_tried_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is as many numbers in one stream as in two, and more than a cache holds."""
    shapes = []
    multiply = prepacked_streams.multiply_prepacked

    def seen(rows, prepacked, *others):
        shapes.append((tuple(prepacked.shape), prepacked.nbytes, tuple(rows.shape)))
        return multiply(rows, prepacked, *others)

    monkeypatch.setattr(prepacked_streams, "multiply_prepacked", seen)
    assert pick_num_streams(1 << 30) in (1, 2)
    assert set(shapes) == {
        ((512, 1, 512, 128), 1 << 26, (10, 1024)),
        ((512, 2, 512, 64), 1 << 26, (10, 1024)),
    }

"""What drafting has learned: saved, merged, refused when it is not usable."""

from __future__ import annotations

import zlib

import msgpack
import numpy as np
import pytest

from hdserve.drafting.arrays import CELL_COUNT, CELL_P
from hdserve.drafting.calibration import (
    MAX_STATE_BYTES,
    MAX_WEIGHT,
    Calibration,
    merge_states,
)
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.errors import SnapshotError
from hdserve.tree import Acceptance, DraftTree
from tests.drafting.helpers import (
    VOCAB_SIZE,
    follow,
    generate,
    make_resources,
    make_sequence,
    propose,
)


def _learned(seed: int, num_tokens: int = 400) -> Calibration:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 20, num_tokens).tolist()
    drafter = Hierarchy(make_resources(text))
    generate(drafter, make_sequence(text[:50]), text)
    return drafter.calibration("default")


def test_state_survives_the_wire_up_to_half_precision() -> None:
    state = _learned(0)
    data = state.to_bytes()
    again = Calibration.from_bytes(data)
    assert np.allclose(again.cells, state.cells, atol=1e-2)
    assert np.allclose(again.weights, state.weights, atol=1e-3)
    assert np.allclose(again.token_bias, state.token_bias, atol=1e-3)
    assert again.num_tokens == state.num_tokens
    assert again.to_bytes() == data
    assert len(data) <= MAX_STATE_BYTES


@pytest.mark.parametrize("vocab_size", [32_000, 151_936, 262_144])
def test_a_state_fits_its_message_however_large_the_vocabulary_is(vocab_size: int) -> None:
    """Every token has a bias; the largest are kept, and merging two leaves them."""
    states = []
    for seed in range(2):
        state = _learned(seed)
        full = state.for_vocabulary(vocab_size)
        full.token_bias[:] = np.random.default_rng(seed).normal(0, 0.1, vocab_size)
        full.token_bias[:1000] = 5.0 + np.arange(1000) % 7
        states.append(full.to_bytes())
    for data in (*states, merge_states(*states)):
        assert len(data) <= MAX_STATE_BYTES
        bias = Calibration.from_bytes(data).token_bias
        assert np.array_equal(bias[:1000], 5.0 + np.arange(1000) % 7)
        assert np.count_nonzero(bias) > 5000


@pytest.mark.parametrize("worth", [0.8, 1.0, 1.25])
def test_scores_are_corrected_by_what_came_of_them(worth: float) -> None:
    """Whatever the uncorrected ones are, expected over accepted becomes 1 and stays there."""
    state = Calibration(VOCAB_SIZE)
    rng = np.random.default_rng(0)
    expected, accepted = np.zeros(20_000), np.zeros(20_000)
    for step in range(20_000):
        uncorrected = rng.uniform(0.0, 3.0)
        expected[step] = uncorrected * state.scale
        accepted[step] = rng.poisson(uncorrected * worth)
        state.count_tree(expected[step], int(accepted[step]))
    assert state.scale == pytest.approx(worth, rel=0.1)
    assert expected[2000:].sum() == pytest.approx(accepted[2000:].sum(), rel=0.02)


def test_the_correction_is_bounded_and_merged() -> None:
    right, wrong = Calibration(VOCAB_SIZE), Calibration(VOCAB_SIZE)
    for _ in range(10_000):
        right.count_tree(1.0, 3)
        wrong.count_tree(1.0, 0)
    assert (right.scale, wrong.scale) == (2.0, 0.5)
    merged = Calibration.from_bytes(merge_states(right.to_bytes(), wrong.to_bytes()))
    assert merged.scale == pytest.approx(1.2, abs=0.1)
    assert Calibration.from_bytes(right.to_bytes()).scale == 2.0


def test_states_of_before_there_was_a_correction_have_none() -> None:
    message = msgpack.unpackb(zlib.decompress(_learned(0).to_bytes()))
    del message["expected_tokens"], message["accepted_tokens"]
    assert Calibration.from_bytes(zlib.compress(msgpack.packb(message))).scale == 1.0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "many"])
def test_a_correction_that_cannot_be_is_refused(value: object) -> None:
    message = msgpack.unpackb(zlib.decompress(_learned(0).to_bytes()))
    message["accepted_tokens"] = value
    with pytest.raises(SnapshotError, match="corrupt"):
        Calibration.from_bytes(zlib.compress(msgpack.packb(message)))


def test_merge_weighs_by_observations() -> None:
    first, second = Calibration(VOCAB_SIZE), Calibration(VOCAB_SIZE)
    first.cells[[CELL_P, CELL_COUNT], 5] = 0.2, 30
    second.cells[[CELL_P, CELL_COUNT], 5] = 0.8, 90
    first.merge([second])
    assert first.cells[CELL_P, 5] == pytest.approx(0.65, abs=0.01)
    assert first.cells[CELL_COUNT, 5] == 90


def test_merging_equal_states_changes_nothing() -> None:
    data = _learned(1).to_bytes()
    merged = Calibration.from_bytes(merge_states(data, data))
    same = Calibration.from_bytes(data)
    assert np.allclose(merged.cells, same.cells, atol=1e-2)
    assert np.allclose(merged.weights, same.weights, atol=1e-3)
    assert merged.num_tokens == same.num_tokens


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        zlib.compress(b"junk"),
        zlib.compress(msgpack.packb({"format": 1})),
        zlib.compress(msgpack.packb([1, 2])),
        Calibration(8).to_bytes()[:-20],
    ],
)
def test_corrupt_state_is_refused(data: bytes) -> None:
    with pytest.raises(SnapshotError, match="calibration"):
        Calibration.from_bytes(data)


def test_newer_format_is_refused() -> None:
    message = msgpack.unpackb(zlib.decompress(Calibration(8).to_bytes()))
    data = zlib.compress(msgpack.packb({**message, "format": 99}))
    with pytest.raises(SnapshotError, match="format 99"):
        Calibration.from_bytes(data)


def test_other_vocabularies_are_not_merged() -> None:
    with pytest.raises(SnapshotError, match="vocabular"):
        merge_states(Calibration(8).to_bytes(), Calibration(9).to_bytes())


def test_scores_become_calibrated() -> None:
    """After 2,000 steps the node scores add up to what is accepted, within a tenth."""
    rng = np.random.default_rng(5)
    successors = rng.integers(0, VOCAB_SIZE, (VOCAB_SIZE, 3))
    text = [0]
    for _ in range(8000):
        text.append(int(successors[text[-1], rng.choice(3, p=[0.6, 0.3, 0.1])]))
    drafter = Hierarchy(make_resources())
    seq = make_sequence(text[:10])
    drafter.start(seq)
    expected, accepted = [], []
    while len(seq.token_ids) < len(text):
        tree = propose(drafter, seq, 8)
        expected.append(sum(tree.scores) - 1)
        acceptance = follow(drafter, seq, tree, text[len(seq.token_ids) :])
        accepted.append(acceptance.num_accepted_tokens)
    assert len(expected) > 2200
    assert sum(expected[2000:]) == pytest.approx(sum(accepted[2000:]), rel=0.1)


def test_weights_are_bounded() -> None:
    """What one request says over and over does not push those of a namespace ever higher."""
    drafter = Hierarchy(make_resources())
    seq = make_sequence([1, 2, 3])
    drafter.start(seq)
    calibration = drafter.calibration(seq.namespace)
    calibration.weights[0, 0], calibration.token_bias[1] = 100.0, -100.0
    for _ in range(5000 // 8):
        step = Acceptance(range(8), [7] * 8)
        drafter.observe(seq, DraftTree(7, 0), step, None)
        seq.token_ids += step.token_ids
    assert 0.0 < calibration.token_bias[7] < MAX_WEIGHT
    assert calibration.weights[0, 0] <= MAX_WEIGHT
    assert calibration.token_bias[1] == -MAX_WEIGHT

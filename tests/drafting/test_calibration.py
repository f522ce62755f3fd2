"""What drafting has learned: saved, merged, refused when it is not usable."""

from __future__ import annotations

import zlib
from functools import reduce
from itertools import permutations

import msgpack
import numpy as np
import pytest

from hdserve.drafting.arrays import CELL_COUNT, CELL_P
from hdserve.drafting.calibration import (
    MAX_WEIGHT,
    Calibration,
    _shipped,
    merge_states,
)
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.drafting.states import MAX_STATES_BYTES
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
    assert len(data) <= MAX_STATES_BYTES


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
        assert len(data) <= MAX_STATES_BYTES
        bias = Calibration.from_bytes(data).token_bias
        assert np.array_equal(bias[:1000], 5.0 + np.arange(1000) % 7)
        assert np.count_nonzero(bias) > 12_000


def test_a_state_is_as_long_as_the_biases_it_has() -> None:
    """A vocabulary that is mostly unseen takes no more room than a small one; what is too small for
    half precision is not sent, so that a state that was unpacked is packed to the same bytes."""
    large = Calibration.prior(1_000_000)
    large.token_bias[::1000] = 0.5
    large.token_bias[1::1000] = 10.0 ** -np.arange(1000)
    data = large.to_bytes()
    assert len(data) < len(Calibration.prior(1000).to_bytes()) + 2000
    again = Calibration.from_bytes(data)
    assert np.array_equal(again.token_bias[::1000], large.token_bias[::1000])
    assert again.to_bytes() == data


@pytest.mark.parametrize("name", ["is_biased", "token_bias"])
def test_biases_without_tokens_are_refused(name: str) -> None:
    message = msgpack.unpackb(zlib.decompress(_learned(0).to_bytes()))
    message[name] = message[name][:-2]
    with pytest.raises(SnapshotError, match="corrupt"):
        Calibration.from_bytes(zlib.compress(msgpack.packb(message)))


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


@pytest.mark.parametrize("name", ["pair_bias", "token_weights"])
def test_what_is_of_pairs_and_by_token_stays_where_it_was_learned(name: str) -> None:
    state, other = _learned(0), _learned(1)
    before = getattr(state, name).copy()
    assert before.any()
    assert not getattr(Calibration.from_bytes(state.to_bytes()), name).any()
    state.merge(other, 0)
    assert np.array_equal(getattr(state, name), before)


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
    first.merge(second, 0)
    assert first.cells[CELL_P, 5] == pytest.approx(0.65, abs=0.01)
    assert first.cells[CELL_COUNT, 5] == pytest.approx(60, abs=0.01)


def _moved(state: bytes, seed: int, num_tokens: int) -> Calibration:
    """What a replica that began with a shared state has learned since."""
    rng = np.random.default_rng(seed)
    moved = Calibration.from_bytes(state)
    moved.base_tokens = moved.num_tokens
    cells = moved.cells
    p = cells[CELL_P, :1000] + rng.normal(0, 0.05, 1000)
    cells[CELL_P, :1000] = np.clip(p, 0.01, 0.99)
    cells[CELL_COUNT, :1000] = rng.integers(0, 1001, 1000)
    moved.weights[:50] += rng.normal(0, 0.1, moved.weights[:50].shape).astype(np.float32)
    moved.token_bias += rng.normal(0, 1.0, moved.vocab_size).astype(np.float32)
    moved.expected_tokens += 100.0 * rng.random()
    moved.count_tokens(num_tokens)
    return moved


def _assert_equal(one: Calibration, other: Calibration) -> None:
    """Up to what half precision, several times, and whole counts leave of them."""
    assert np.allclose(one.cells[CELL_P], other.cells[CELL_P], atol=4e-3)
    assert np.allclose(one.cells[CELL_COUNT], other.cells[CELL_COUNT], atol=2)
    assert np.allclose(one.weights, other.weights, atol=4e-3)
    assert np.allclose(one.token_bias, other.token_bias, atol=8e-3)
    assert one.expected_tokens == pytest.approx(other.expected_tokens)
    assert one.num_tokens == other.num_tokens


@pytest.mark.parametrize("num_before", [0, 100_000])
def test_a_replica_alone_loses_nothing_by_sharing(num_before: int) -> None:
    """However much was learned before, and whatever it goes on to learn meanwhile."""
    drafter, kept = Hierarchy(make_resources()), b""
    calibration = drafter.calibration("default")
    calibration.num_tokens = calibration.base_tokens = num_before
    for cycle in range(1, 7):
        calibration.token_bias[7] += 1.0
        calibration.count_tokens(2000)
        state = drafter.state("default")
        assert state is not None
        kept = merge_states(kept, state) if kept else state
        assert kept == state
        calibration.weights[0, 0] = cycle
        calibration.count_tokens(1)
        drafter.adopt("default", kept)
        assert drafter.calibration("default") is calibration
        assert (calibration.token_bias[7], calibration.weights[0, 0]) == (cycle, cycle)
        assert calibration.num_tokens == num_before + 2001 * cycle


def test_two_with_equal_evidence_become_their_mean() -> None:
    base = _moved(Calibration.prior(VOCAB_SIZE).to_bytes(), 0, 5000).to_bytes()
    first, second = _moved(base, 1, 3000), _moved(base, 2, 3000)
    second.cells[CELL_COUNT] = first.cells[CELL_COUNT]
    mean = Calibration(VOCAB_SIZE)
    mean.cells[:] = (first.cells + second.cells) / 2
    mean.weights[:] = (first.weights + second.weights) / 2
    mean.token_bias[:] = (first.token_bias + second.token_bias) / 2
    mean.expected_tokens = (first.expected_tokens + second.expected_tokens) / 2
    mean.num_tokens = 11_000
    kept = merge_states(base, first.to_bytes())
    _assert_equal(Calibration.from_bytes(merge_states(kept, second.to_bytes())), mean)


def test_the_order_of_replicas_does_not_matter() -> None:
    """Of those that began with the same state, each counts by what it learned since."""
    base = _moved(Calibration.prior(VOCAB_SIZE).to_bytes(), 0, 50_000).to_bytes()
    numbers = ((1, 1000), (2, 8000), (3, 3000))
    states = [_moved(base, seed, num_tokens).to_bytes() for seed, num_tokens in numbers]
    merged = [
        Calibration.from_bytes(reduce(merge_states, order, base)) for order in permutations(states)
    ]
    for other in merged[1:]:
        _assert_equal(merged[0], other)
    assert merged[0].num_tokens == 62_000
    parts = [Calibration.from_bytes(state) for state in states]
    weights = sum(part.weights * part.num_new_tokens for part in parts) / 12_000
    assert np.allclose(merged[0].weights, weights, atol=4e-3)


def test_a_cell_that_one_replica_observed_is_as_that_one_has_it() -> None:
    first, second = Calibration(VOCAB_SIZE), Calibration(VOCAB_SIZE)
    first.num_tokens = second.num_tokens = 1000
    first.cells[[CELL_P, CELL_COUNT], 5] = 0.9, 40
    first.merge(second, 0)
    assert first.cells[CELL_P, 5] == pytest.approx(0.9, abs=0.01)


def test_the_prior_is_read_once_and_every_namespace_has_its_own() -> None:
    first, second = Calibration.prior(8), Calibration.prior(9)
    before = second.to_bytes()
    first.cells[:] = 0.5
    first.weights[:] = 7.0
    assert second.to_bytes() == before == Calibration.prior(9).to_bytes()
    assert _shipped() is _shipped()


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
    calibration.pair_bias[0] = calibration.token_weights[0, 0] = 100.0
    for _ in range(5000 // 8):
        step = Acceptance(range(8), [7] * 8)
        drafter.observe(seq, DraftTree(7, 0), step, None)
        seq.token_ids += step.token_ids
    assert 0.0 < calibration.token_bias[7] < MAX_WEIGHT
    assert calibration.weights[0, 0] <= MAX_WEIGHT
    assert calibration.token_bias[1] == -MAX_WEIGHT
    assert calibration.pair_bias.max() == MAX_WEIGHT
    assert calibration.token_weights.max() == MAX_WEIGHT

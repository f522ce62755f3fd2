"""What the hierarchy drafter learns, by namespace: kept, shared, bounded and forgotten."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from hdserve.core import Source
from hdserve.drafting import calibrations
from hdserve.drafting.base import DraftResources
from hdserve.drafting.calibration import Calibration
from hdserve.drafting.hierarchy import Hierarchy, HierarchyOptions
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

FEW = 8
"""Calibrations that are unpacked in ``few_calibrations``."""

PHRASE = [11, 12, 13, 14, 15, 16, 17, 18]


@pytest.fixture
def few_calibrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrations, "MAX_BYTES", FEW * Calibration(VOCAB_SIZE).num_bytes)


def test_the_correction_of_scores_changes_no_tree() -> None:
    """But for how many nodes are above a floor."""
    few, many = tree_where_accepted(0), tree_where_accepted(3)
    assert (few.token_ids, few.parents) == (many.token_ids, many.parents)
    assert np.allclose(np.minimum(4 * np.array(few.scores[1:]), 0.997), many.scores[1:])
    floor = few.scores[-4]
    least_few, least_many = tree_where_accepted(0, floor), tree_where_accepted(3, floor)
    assert min(least_few.scores + least_many.scores) >= floor
    assert 1 < len(least_few) < len(least_many)


def tree_where_accepted(num_accepted: int, min_score: float = 0.0) -> DraftTree:
    """What is drafted where so many tokens were accepted for each that was expected."""
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 5, 4, 6, 1, 2]
    drafter = Hierarchy(make_resources(text), HierarchyOptions(min_score=min_score))
    seq = make_sequence(text)
    drafter.start(seq)
    for _ in range(2000):
        drafter.calibration("default").count_tree(1.0, num_accepted)
    return propose(drafter, seq)


def test_a_rate_of_0_learns_nothing() -> None:
    """Neither weights nor what scores are worth; so there is nothing to share."""
    drafter = Hierarchy(make_resources(PHRASE), HierarchyOptions(learning_rate=0.0))
    before = drafter.calibration("default").to_bytes()
    generate(drafter, make_sequence(PHRASE), [*range(1, 50)] * 25)
    assert drafter.calibration("default").to_bytes() == before
    assert drafter.state("default") is None


def test_a_request_that_is_not_shared_learns_for_itself() -> None:
    """It is drafted for as well as others, and leaves nothing."""
    drafter, other = (Hierarchy(make_resources(PHRASE), HierarchyOptions()) for _ in range(2))
    for each in (drafter, other):
        generate(each, make_sequence(PHRASE), [*range(20, 40)] * 20)
    learned = drafter.calibration("default")
    before = learned.copy()
    output = [*range(100, 160)] * 20
    trees = generate(drafter, make_sequence(PHRASE, is_output_shared=False), output)
    shared = generate(other, make_sequence(PHRASE), output)
    assert len(trees) == pytest.approx(len(shared), rel=0.05)
    assert learned.to_bytes() == before.to_bytes()
    for name in ("cells", "weights", "token_weights", "token_bias", "pair_bias"):
        assert np.array_equal(getattr(learned, name), getattr(before, name))
    assert drafter.calibration("default").num_tokens == 400


@pytest.mark.parametrize(("source", "is_own"), [(Source.CONTEXT, True), (Source.MODEL, False)])
def test_the_scores_of_other_drafters_are_not_judged(source: Source, is_own: bool) -> None:
    """Another one of the same kind may draft from other sources."""
    drafter = Hierarchy(make_resources(PHRASE), HierarchyOptions(model=False))
    seq = make_sequence([1, 2])
    drafter.start(seq)
    calibration = drafter.calibration("default")
    before = calibration.expected_tokens
    tree = DraftTree(2, 4)
    tree.add_path([3, 4], source, 0.5)
    follow(drafter, seq, tree, [3, 5])
    assert (calibration.expected_tokens != before) is is_own


def test_only_estimates_are_judged() -> None:
    """Of a tree that others filled nothing is learned of how good scores are."""
    drafter = Hierarchy(make_resources([1, 2, 3, 4]))
    seq = make_sequence([1, 2])
    drafter.start(seq)
    tree = DraftTree(2, 4)
    tree.add_path([3, 4], Source.OTHER)
    follow(drafter, seq, tree, [3, 5])
    calibration = drafter.calibration("default")
    assert calibration.scale == 1.0
    num_expected, num_accepted = calibration.expected_tokens, calibration.accepted_tokens
    tree = DraftTree(5, 8)
    tree.add_path([3], Source.CONTEXT)
    tree.add_path([7, 8], Source.OTHER, 0.6)
    tree.add_path([4, 6], Source.CONTEXT, 0.25)
    follow(drafter, seq, tree, [4, 6, 7])
    assert calibration.expected_tokens == pytest.approx(num_expected + 0.5, abs=0.3)
    assert calibration.accepted_tokens == pytest.approx(num_accepted + 2, abs=0.3)


def test_observe_learns_without_a_draft() -> None:
    """Prefill and steps without a tree reach the drafter the same way."""
    drafter = Hierarchy(DraftResources(VOCAB_SIZE))
    seq = make_sequence([1, 2, 3])
    drafter.start(seq)
    seq.token_ids.append(4)
    drafter.observe(seq, DraftTree(3, 0), Acceptance((0,), (4,)), None)
    assert drafter.calibration("default").num_tokens == 1


def test_calibration_is_kept_per_namespace_and_can_be_adopted() -> None:
    drafter = Hierarchy(make_resources(PHRASE))
    generate(drafter, make_sequence(PHRASE, namespace="a"), PHRASE)
    assert drafter.calibration("a").num_tokens == len(PHRASE)
    assert drafter.calibration("b").num_tokens == 0
    drafter.adopt("b", drafter.calibration("a").to_bytes())
    assert drafter.calibration("b").num_tokens == len(PHRASE)
    with pytest.raises(SnapshotError, match="vocabulary"):
        drafter.adopt("b", Calibration(VOCAB_SIZE + 1).to_bytes())


def test_running_requests_learn_for_the_others_after_an_adoption() -> None:
    drafter = Hierarchy(make_resources(PHRASE))
    running = make_sequence(PHRASE)
    drafter.start(running)
    other = Calibration.prior(VOCAB_SIZE)
    other.token_bias[9] = 2.0
    other.count_tokens(5000)
    drafter.adopt("default", other.to_bytes())
    running.token_ids.append(4)
    drafter.observe(running, DraftTree(PHRASE[-1], 0), Acceptance((0,), (4,)), None)
    calibration = drafter.calibration("default")
    assert running.drafter_state[drafter.name].calibration is calibration
    assert calibration.num_tokens == 5001
    assert calibration.token_bias[9] == pytest.approx(2.0, abs=0.01)


def test_a_slow_replica_shares_in_the_end() -> None:
    """What it learned between two states of the others is neither lost nor counted anew."""
    drafter, kept = Hierarchy(make_resources()), Calibration.prior(VOCAB_SIZE)
    calibration = drafter.calibration("default")
    for _ in range(10):
        assert drafter.state("default") is None
        calibration.token_bias[7] += 1.0
        calibration.count_tokens(100)
        kept.count_tokens(2000)
        drafter.adopt("default", kept.to_bytes())
        assert calibration.token_bias[7] > 0.0
    shared = drafter.state("default")
    assert shared is not None
    assert Calibration.from_bytes(shared).num_new_tokens == 1000
    assert Calibration.from_bytes(shared).num_tokens == 21_000


def test_nothing_of_a_flushed_namespace_stays_in_memory() -> None:
    """Nor of one whose text was dropped for others; the replica may have nothing to do since."""
    resources = make_resources(PHRASE)
    database = resources.model_database
    assert database is not None
    drafter = Hierarchy(resources)

    def log_of(namespace: str) -> weakref.ref[object]:
        database.insert(namespace, PHRASE)
        generate(drafter, make_sequence(PHRASE, namespace=namespace), PHRASE)
        partition = database.partition(namespace)
        assert partition is not None
        return weakref.ref(partition.log)

    flushed, dropped = log_of("a"), log_of("b")
    database.clear("a")
    drafter.forget("a")
    database.clear("b")
    generate(drafter, make_sequence(PHRASE, namespace="c"), PHRASE)
    gc.collect()
    assert (flushed(), dropped()) == (None, None)


@pytest.mark.usefixtures("few_calibrations")
def test_the_memory_of_calibrations_is_known() -> None:
    """Of those in use, and of those that are packed, which take less."""
    drafter = Hierarchy(make_resources(PHRASE))
    assert drafter.learned() == (0, 0)
    one = drafter.calibration("0")
    assert drafter.learned() == (1, one.num_bytes)
    drafter.adopt("adopted", one.to_bytes())
    assert one.num_bytes < drafter.learned().num_bytes < one.num_bytes * 1.2
    for number in range(2 * FEW):
        drafter.calibration(str(number))
    assert drafter.learned().num_entries == 2 * FEW + 1
    packed_bytes = drafter.learned().num_bytes - FEW * one.num_bytes
    assert 0 < packed_bytes < (FEW + 1) * one.num_bytes / 5
    drafter.forget("adopted")
    assert drafter.learned().num_entries == 2 * FEW


@pytest.mark.usefixtures("few_calibrations")
def test_the_calibrations_of_namespaces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other replicas' namespaces do not push out one that is used here; one that was
    packed is as it was, also in what it shares, and only beyond all bounds begins anew."""
    monkeypatch.setattr(calibrations, "MAX_PACKED_CALIBRATIONS", 299)
    drafter = Hierarchy(make_resources(PHRASE))
    generate(drafter, make_sequence(PHRASE, namespace="a"), [*range(1, 50)] * 25)
    busy = drafter.calibration("a")
    learned = busy.to_bytes()
    for number in range(299):
        drafter.adopt(str(number), learned)
    assert drafter.calibration("a") is busy
    for number in range(FEW):
        calibration = drafter.calibration(str(number))
        assert (calibration.num_tokens, calibration.num_new_tokens) == (busy.num_tokens, 0)
    again = drafter.calibration("a")
    assert again is not busy
    assert (again.num_tokens, again.num_new_tokens) == (busy.num_tokens, busy.num_new_tokens)
    assert drafter.state("a") is not None
    for number in range(300):
        drafter.adopt(f"other {number}", learned)
    assert drafter.calibration("other 0").num_tokens == 0
    assert drafter.calibration("other 2").num_tokens == busy.num_tokens


def test_hundreds_of_namespaces_take_turns_without_packing() -> None:
    drafter = Hierarchy(make_resources(PHRASE))
    first = [drafter.calibration(str(number)) for number in range(300)]
    assert all(drafter.calibration(str(number)) is first[number] for number in range(300))


@pytest.mark.usefixtures("few_calibrations")
def test_what_a_running_request_learns_is_never_lost() -> None:
    """However many other namespaces come meanwhile; when it has ended its turn comes, too."""
    drafter = Hierarchy(make_resources(PHRASE))
    running = make_sequence(PHRASE, namespace="a")
    drafter.start(running)
    busy = drafter.calibration("a")
    for number in range(3 * FEW):
        drafter.calibration(str(number))
    busy.count_tokens(5000)
    busy.pair_bias[3] = 1.0
    assert drafter.calibration("a") is busy
    assert drafter.state("a") is not None
    sequences = [make_sequence(PHRASE, namespace=str(number)) for number in range(2 * FEW)]
    for seq in sequences:
        drafter.start(seq)
    held = [seq.drafter_state[drafter.name].calibration for seq in sequences]
    assert held == [drafter.calibration(seq.namespace) for seq in sequences]
    for seq in (running, *sequences):
        drafter.finish(seq)
    for number in range(FEW):
        drafter.calibration(f"new {number}")
    again = drafter.calibration("a")
    assert again is not busy
    assert again.num_tokens == 5000


@pytest.mark.usefixtures("few_calibrations")
def test_what_was_learned_before_it_was_packed_is_merged() -> None:
    drafter = Hierarchy(make_resources(PHRASE))
    drafter.calibration("a").token_bias[9] = 2.0
    drafter.calibration("a").count_tokens(5000)
    for number in range(FEW):
        drafter.calibration(str(number))
    other = Calibration.prior(VOCAB_SIZE)
    other.count_tokens(5000)
    drafter.adopt("a", other.to_bytes())
    calibration = drafter.calibration("a")
    assert (calibration.num_tokens, calibration.num_new_tokens) == (10_000, 5000)
    assert calibration.token_bias[9] == pytest.approx(1.0, abs=0.01)


def test_what_was_learned_of_a_namespace_can_be_forgotten() -> None:
    """It begins with the prior again; what a running request goes on to learn is not shared."""
    resources = make_resources(PHRASE)
    drafter = Hierarchy(resources)
    generate(drafter, make_sequence(PHRASE, namespace="a"), PHRASE)
    generate(drafter, make_sequence(PHRASE, namespace="b"), PHRASE)
    running = make_sequence(PHRASE, namespace="a")
    drafter.start(running)
    drafter.forget("a")
    drafter.forget("unknown")
    running.token_ids.append(4)
    drafter.observe(running, DraftTree(PHRASE[-1], 0), Acceptance((0,), (4,)), None)
    prior = Calibration.prior(VOCAB_SIZE).to_bytes()
    assert drafter.calibration("a").to_bytes() == prior
    assert drafter.calibration("b").to_bytes() != prior
    many = [*range(1, 50)] * 25
    generate(drafter, make_sequence(PHRASE, namespace="a"), many)
    assert drafter.state("a") is not None, "counted from the flush on"
    drafter.forget("a")
    assert drafter.state("a") is None

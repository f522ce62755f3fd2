"""The hierarchy drafter: valid, ordered, repeatable trees from the databases it may use."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.bench.replay import verify_recorded
from hdserve.core import SamplingParams, Sequence, Source
from hdserve.databases.context import ContextDatabase
from hdserve.databases.model import ModelDatabase
from hdserve.databases.ngram import FIRST_SLOT, MAX_COUNT
from hdserve.databases.recycled import RecycledDatabase
from hdserve.drafting.base import DraftResources, Verified
from hdserve.drafting.calibration import Calibration
from hdserve.drafting.growth import EXPANSION_BOUND
from hdserve.drafting.hierarchy import Hierarchy, HierarchyOptions
from hdserve.tree import Acceptance, DraftTree
from tests.drafting.helpers import (
    VOCAB_SIZE,
    check_tree,
    follow,
    generate,
    make_resources,
    make_sequence,
    paths,
    propose,
    scores_by_path,
)

PHRASE = [11, 12, 13, 14, 15, 16, 17, 18]
SMALL_TEXTS = st.lists(st.integers(0, 12), min_size=1, max_size=60)


@settings(max_examples=40, deadline=None)
@given(prompt=SMALL_TEXTS, output=SMALL_TEXTS, earlier=SMALL_TEXTS, capacity=st.integers(1, 40))
def test_trees_are_valid_and_in_order_of_score(
    prompt: list[int], output: list[int], earlier: list[int], capacity: int
) -> None:
    """Parents first, distinct siblings, within budget, and any prefix is the best smaller tree."""
    resources = make_resources(earlier, statistics=[earlier[::-1]])
    for tree in generate(Hierarchy(resources), make_sequence(prompt), output, capacity):
        check_tree(tree)
        assert tree.scores == sorted(tree.scores, reverse=True)


@settings(max_examples=20, deadline=None)
@given(prompt=SMALL_TEXTS, output=SMALL_TEXTS, earlier=SMALL_TEXTS)
def test_same_databases_and_state_give_the_same_trees(
    prompt: list[int], output: list[int], earlier: list[int]
) -> None:
    """Tables that were used before, and a drafter that is new, change nothing."""

    def trees(drafter: Hierarchy) -> list[tuple[list[int], list[int], list[float]]]:
        made = generate(drafter, make_sequence(prompt), output)
        return [(tree.token_ids, tree.parents, tree.scores) for tree in made]

    used = Hierarchy(make_resources(earlier))
    fresh_state = Calibration.prior(VOCAB_SIZE).to_bytes()
    generate(used, make_sequence(earlier), output)
    results = []
    for drafter in (used, Hierarchy(make_resources(earlier))):
        drafter.forget("default")
        drafter.adopt("default", fresh_state)
        results.append(trees(drafter))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("source", "resources"),
    [
        (Source.MODEL, make_resources(PHRASE, PHRASE)),
        (Source.STATISTICS, make_resources(statistics=[PHRASE, PHRASE])),
    ],
)
def test_shared_databases_draft_what_they_hold(source: Source, resources: DraftResources) -> None:
    drafter = Hierarchy(resources)
    seq = make_sequence([1, 2, 3])
    drafter.start(seq)
    follow(drafter, seq, DraftTree(3, 0), PHRASE[:1])
    follow(drafter, seq, DraftTree(11, 0), PHRASE[1:2])
    tree = propose(drafter, seq)
    assert PHRASE[2:] in [path[: len(PHRASE) - 2] for path in paths(tree)]
    node = tree.child(0, 13)
    assert node is not None
    assert tree.sources[node] == source


def test_request_draws_on_its_own_text() -> None:
    drafter = Hierarchy(DraftResources(VOCAB_SIZE))
    seq = make_sequence([1, *PHRASE, 2, 11, 12, 13])
    drafter.start(seq)
    tree = propose(drafter, seq)
    assert [14, 15, 16, 17] in [path[:4] for path in paths(tree)]
    assert set(tree.sources[1:]) == {Source.CONTEXT}


def test_what_the_request_said_before_is_likelier() -> None:
    """Once it is learned that of two tokens which statistics hold for equal the one in the prompt
    comes, though no context of the request knows it."""
    swapped = np.random.default_rng(2).permutation(100) < 50
    first, second = np.arange(100, 200), np.arange(200, 300)
    said, other = np.where(swapped, second, first), np.where(swapped, first, second)
    statistics = [[i, token] for i in range(100) for token in (i + 100, i + 200)]
    drafter = Hierarchy(
        make_resources(statistics=statistics), HierarchyOptions(learning_rate=0.004)
    )
    seq = make_sequence(said.tolist())
    drafter.start(seq)
    scores = []
    for i in range(100):
        follow(drafter, seq, DraftTree(0, 0), [i])
        tree = propose(drafter, seq)
        nodes = [tree.child(0, int(token)) for token in (said[i], other[i])]
        scores.append([tree.scores[node] if node else 0.0 for node in nodes])
        follow(drafter, seq, DraftTree(0, 0), [int(said[i])])
    likelier, unlikelier = np.sum(scores[50:], axis=0)
    assert likelier > 1.5 * unlikelier


def test_which_token_comes_after_which_is_learned_beside_the_databases() -> None:
    """They hold 20 and 21 after 10 and after 11, for equal; only 20 comes after 10 and 21 after
    11."""
    resources = make_resources(*[[10, 20], [11, 20], [10, 21], [11, 21]] * 8)
    drafter = Hierarchy(resources, HierarchyOptions(context=False))
    scores: dict[int, list[float]] = {}
    for previous, right, wrong in [(10, 20, 21), (11, 21, 20)] * 60:
        seq = make_sequence([1])
        drafter.start(seq)
        follow(drafter, seq, DraftTree(1, 0), [previous])
        tree = propose(drafter, seq)
        nodes = [tree.child(0, token) for token in (right, wrong)]
        scores[previous] = [tree.scores[node] if node else 0.0 for node in nodes]
        follow(drafter, seq, DraftTree(previous, 0), [right])
        drafter.finish(seq)
    for right_score, wrong_score in scores.values():
        assert right_score > 2 * wrong_score


def _scores_of(
    drafter: Hierarchy, said: list[int], tokens: tuple[int, int], coming: int
) -> list[float]:
    """Of ``tokens`` after an output, before it is seen that ``coming`` comes."""
    seq = make_sequence([1])
    drafter.start(seq)
    for token in said:
        follow(drafter, seq, DraftTree(seq.token_ids[-1], 0), [token])
    tree = propose(drafter, seq)
    nodes = [tree.child(0, token) for token in tokens]
    follow(drafter, seq, DraftTree(said[-1], 0), [coming])
    drafter.finish(seq)
    return [tree.scores[node] if node else 0.0 for node in nodes]


def test_what_comes_beside_the_strongest_is_learned_beside_the_databases() -> None:
    """They hold 22 and 23 for equal and 20 or 21 more often, which comes two times of three; else
    22 comes beside 20 and 23 beside 21.  The token before is new each time."""
    rounds = list(enumerate([(20, 22, 23), (21, 23, 22)] * 200, start=100))
    outputs = [
        [before, token] for before, tokens in rounds for token in (tokens[0], *sorted(tokens))
    ]
    drafter = Hierarchy(make_resources(*outputs), HierarchyOptions(context=False))
    scores = []
    for before, (strong, right, wrong) in rounds:
        coming = strong if before % 3 else right
        scores.append(_scores_of(drafter, [before], (right, wrong), coming))
    right_score, wrong_score = np.sum(scores[200:], axis=0)
    assert right_score > 2 * wrong_score


def test_which_database_is_right_is_learned_by_the_token_before() -> None:
    """The model database is right after 10, statistics after 11; the tokens are new each time."""
    ids = np.random.default_rng(0).permutation(np.arange(20, 500))[:360].reshape(60, 2, 3).tolist()
    rounds = [(10 + kind, *tokens) for pair in ids for kind, tokens in enumerate(pair)]
    resources = make_resources(
        *([before, last, by_model] for last, before, by_model, _ in rounds),
        statistics=[[before, last, counted] for last, before, _, counted in rounds],
    )
    drafter = Hierarchy(resources, HierarchyOptions(context=False, learning_rate=0.02))
    scores = []
    for last, before, by_model, counted in rounds:
        right, wrong = (by_model, counted) if last == 10 else (counted, by_model)
        scores.append(_scores_of(drafter, [before, last], (right, wrong), right))
    for kind in range(2):
        right_score, wrong_score = np.sum(scores[60 + kind :: 2], axis=0)
        assert right_score > 1.5 * wrong_score


def test_long_copies_fill_the_depth() -> None:
    """A passage of 200 tokens that comes again is drafted 24 tokens at a time once it is known."""
    passage = np.random.default_rng(0).permutation(VOCAB_SIZE)[:200].tolist()
    trees = generate(Hierarchy(DraftResources(VOCAB_SIZE)), make_sequence(passage), passage, 24)
    assert max(max(tree.depths) for tree in trees) >= 16
    assert len(trees) < 40


@pytest.mark.parametrize("source", [Source.CONTEXT, Source.MODEL])
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param([450], 61, id="replaced"),
        pytest.param([61], 62, id="left out"),
        pytest.param([450, 60], 61, id="put in"),
    ],
)
def test_near_copies_stay_aligned(source: Source, said: list[int], expected: int) -> None:
    """One token differs: the copy goes on behind it at once, without a new match.

    ``said`` follows the first 60 tokens of a passage; numbers below 120 are places in it.
    """
    passage = np.random.default_rng(1).permutation(400)[:120].tolist()
    near = passage[:60] + [passage[token] if token < 120 else token for token in said]
    from_model = source is Source.MODEL
    resources = make_resources(passage) if from_model else DraftResources(VOCAB_SIZE)
    seq = make_sequence([499] if from_model else [*passage, 499], databases={source.label})
    drafter = Hierarchy(resources)
    drafter.start(seq)
    follow(drafter, seq, DraftTree(499, 0), near[:1])
    while seq.num_output_tokens < len(near):
        follow(drafter, seq, propose(drafter, seq), near[seq.num_output_tokens :])
    assert seq.token_ids[-1] == near[-1]
    found = paths(propose(drafter, seq))
    assert max(_num_equal(path, passage[expected:]) for path in found) >= 3


def _num_equal(path: list[int], text: list[int]) -> int:
    """How far a path follows a text."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, text))))  # noqa: B905


@pytest.mark.parametrize("changed_every", [None, 40])
def test_repeated_requests_accept_nearly_the_whole_budget(changed_every: int | None) -> None:
    """An agent that runs again says nearly what it said before, among much else."""
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, VOCAB_SIZE, 4).tolist() for _ in range(200)]
    outputs = [
        [token for phrase in rng.integers(0, len(phrases), 60) for token in phrases[phrase]]
        for _ in range(20)
    ]
    drafter = Hierarchy(make_resources(*outputs))
    num_tokens = num_steps = 0
    for number, output in enumerate(outputs):
        again = list(output)
        if changed_every is not None:
            places = range(number, len(again), changed_every)
            for place in places:
                again[place] = int(rng.integers(0, VOCAB_SIZE))
        num_steps += len(generate(drafter, make_sequence([1, 2, 3]), again))
        num_tokens += len(again)
    best = 17.0 if changed_every is None else 40 / 3
    assert num_tokens / num_steps > 0.8 * best


def test_prediction_is_copied() -> None:
    """Text the client expects is drafted from the first matching token on."""
    drafter = Hierarchy(DraftResources(VOCAB_SIZE))
    seq = make_sequence([1, 2], prediction=(*PHRASE, VOCAB_SIZE + 5))
    drafter.start(seq)
    follow(drafter, seq, DraftTree(2, 0), PHRASE[:1])
    assert PHRASE[1:4] in [path[:3] for path in paths(propose(drafter, seq))]


def test_the_beginning_of_a_prediction_is_drafted_first() -> None:
    """It is what comes behind the prompt, of which nothing has been decided yet."""
    drafter = Hierarchy(DraftResources(VOCAB_SIZE))
    seq = make_sequence([1, 2], prediction=PHRASE)
    drafter.start(seq)
    assert PHRASE[:4] in [path[:4] for path in paths(propose(drafter, seq))]


@pytest.mark.parametrize(
    ("prompt", "namespace", "databases", "is_drafted"),
    [
        ([1, 2, 3], "default", None, True),
        ([1, 2, 4], "default", None, False),
        ([1, 2, 3], "other", None, False),
        ([1, 2, 3], "default", frozenset({"context"}), False),
    ],
)
def test_the_last_answer_to_the_same_prompt_is_drafted_from_its_first_token_on(
    prompt: list[int], namespace: str, databases: frozenset[str] | None, is_drafted: bool
) -> None:
    """Though others that begin likewise came since."""
    resources = make_resources()
    drafter = Hierarchy(resources)
    before = make_sequence([1, 2, 3])
    generate(drafter, before, PHRASE)
    assert resources.model_database is not None
    resources.model_database.record(before)
    resources.model_database.apply("default", [[*PHRASE[:3], 20 + number] for number in range(9)])
    seq = make_sequence(prompt, namespace=namespace, databases=databases)
    drafter.start(seq)
    found = [path[:8] for path in paths(propose(drafter, seq))]
    assert (PHRASE in found) == is_drafted


@pytest.mark.parametrize("num_said", [1, 4, 6])
def test_it_is_drafted_as_well_where_drafts_begin_in_mid_answer(num_said: int) -> None:
    """As they do where a step cannot have drafts, or none paid until then."""
    resources = make_resources(*[[*PHRASE[:size], 20 + size] for size in (1, 4, 6)] * 9)
    assert resources.model_database is not None
    before = make_sequence([1, 2, 3])
    before.token_ids += PHRASE
    resources.model_database.record(before)
    resources.model_database.apply("default", [[*PHRASE[:num_said], 20 + num_said]])
    drafter, seq = Hierarchy(resources), make_sequence([1, 2, 3])
    seq.token_ids += PHRASE[:num_said]
    drafter.start(seq)
    assert paths(propose(drafter, seq, 8 - num_said)) == [PHRASE[num_said:]]


@pytest.mark.parametrize("num_said", [0, 1, 4])
def test_a_prediction_is_drafted_from_where_the_answer_is(num_said: int) -> None:
    """Also where drafts begin in mid-answer: it stands behind the end of the prompt."""
    drafter, seq = Hierarchy(make_resources()), make_sequence([1, 2, 3, 4, 5], prediction=PHRASE)
    seq.token_ids += PHRASE[:num_said]
    drafter.start(seq)
    assert PHRASE[num_said:] in [path[: 8 - num_said] for path in paths(propose(drafter, seq, 8))]


@pytest.mark.parametrize(
    ("params", "is_drafted"),
    [({}, False), ({"ignore_eos": True}, True), ({"min_tokens": 9}, True)],
)
def test_a_token_that_ends_the_answer_is_no_guess(params: dict[str, Any], is_drafted: bool) -> None:
    """Where it is right the model chooses it after the node before, and nothing would follow."""
    ending = 9
    database = ModelDatabase(1 << 22)
    database.apply("default", [[5, 6, 7, 8, ending]] * 3)
    resources = DraftResources(VOCAB_SIZE, database, ending_token_ids=frozenset({ending}))
    drafter = Hierarchy(resources)
    seq = make_sequence([1, 2])
    seq.params = SamplingParams(**params)
    drafter.start(seq)
    follow(drafter, seq, DraftTree(2, 0), [5, 6])
    found = propose(drafter, seq)
    assert 8 in found.token_ids
    assert (ending in found.token_ids[1:]) == is_drafted


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, {Source.CONTEXT, Source.MODEL, Source.STATISTICS}),
        ({"context"}, {Source.CONTEXT}),
        ({"model"}, {Source.MODEL}),
        ({"statistics"}, {Source.STATISTICS}),
        (set(), set()),
    ],
)
def test_requests_choose_their_databases(allowed: set[str] | None, expected: set[Source]) -> None:
    resources = make_resources([5, 6, 5, 7, 5, 8], statistics=[[5, 20, 21, 5, 22]])
    databases = None if allowed is None else frozenset(allowed)
    drafter = Hierarchy(resources)
    seq = make_sequence([5, 30, 31, 5, 32], databases=databases)
    drafter.start(seq)
    follow(drafter, seq, DraftTree(32, 0), [5])
    assert set(propose(drafter, seq, 40).sources[1:]) <= expected
    assert bool(expected) == bool(propose(drafter, seq, 40).num_draft_tokens)


@pytest.mark.parametrize("allowed", ["context", "model", "statistics"])
def test_a_repeated_text_is_drafted_from_the_chosen_database_only(allowed: str) -> None:
    """Copies of long matches, too, come only from where the request allows."""
    text = [*range(40, 70)] * 2
    resources = make_resources(text, statistics=[text])
    seq = make_sequence([*range(40, 60)], databases=frozenset({allowed}))
    trees = generate(Hierarchy(resources), seq, text[20:])
    sources = {source for tree in trees for source in tree.sources[1:]}
    assert {source.label for source in sources} == {allowed}


@pytest.mark.parametrize(("allowed", "other"), [("context", "model"), ("model", "context")])
def test_copies_come_from_chosen_databases_only(allowed: str, other: str) -> None:
    """Long copies are found by another way than short contexts; it is switched as well."""
    rng = np.random.default_rng(0)
    texts = {"context": rng.integers(0, 200, 40).tolist(), "model": list(range(200, 240))}
    for databases in ({allowed}, {allowed, other}):
        drafter = Hierarchy(make_resources(texts["model"]))
        seq = make_sequence(texts["context"] + [300], databases=frozenset(databases))
        drafter.start(seq)
        follow(drafter, seq, DraftTree(300, 0), texts[other][:1])
        drafted = set()
        for token in texts[other][1:20]:
            follow(drafter, seq, DraftTree(0, 0), [token])
            tree = propose(drafter, seq)
            assert {source.label for source in tree.sources[1:]} <= databases
            drafted |= set(tree.token_ids[1:])
        assert bool(drafted & set(texts[other][20:])) is (other in databases)


@pytest.mark.parametrize("before", [[], [[5, 20, 21]]])
def test_another_corpus_is_drafted_from_at_once(before: list[list[int]]) -> None:
    """By the sequence that runs, and by the next one; where there was none before, too."""
    drafter = Hierarchy(make_resources(statistics=before))

    def begun() -> Sequence:
        seq = make_sequence([5, 30, 31], databases=frozenset({"statistics"}))
        drafter.start(seq)
        follow(drafter, seq, DraftTree(31, 0), [5])
        return seq

    running = begun()
    assert propose(drafter, running, 8).token_ids[1:2] == [20] * len(before)
    statistics = make_resources(statistics=[[5, 40, 41]]).statistics
    assert statistics is not None
    drafter.use_statistics(statistics)
    for seq in (running, begun()):
        assert propose(drafter, seq, 8).token_ids[1] == 40


def test_no_corpus_is_drafted_from_any_more() -> None:
    """Once it was taken away; by the sequence that runs, too."""
    drafter = Hierarchy(make_resources(statistics=[[5, 20, 21]]))
    seq = make_sequence([5, 30, 31], databases=frozenset({"statistics"}))
    drafter.start(seq)
    follow(drafter, seq, DraftTree(31, 0), [5])
    assert propose(drafter, seq, 8).num_draft_tokens
    drafter.use_statistics(None)
    assert not propose(drafter, seq, 8).num_draft_tokens


@pytest.mark.parametrize("total", [0, 1])
def test_a_damaged_corpus_costs_only_guesses(total: int) -> None:
    """Counts above the total of their row."""
    text = list(range(100, 160))
    resources = make_resources(statistics=[text])
    assert resources.statistics is not None
    rows = resources.statistics.rows
    rows[:, FIRST_SLOT:] |= np.uint32(MAX_COUNT << 20)
    rows[:, 2] = total
    drafter = Hierarchy(resources)
    for begin in range(1, 50):
        for tree in generate(drafter, make_sequence(text[:begin]), text[begin:]):
            check_tree(tree)
    assert np.isfinite(drafter.calibration("default").weights).all()


@pytest.mark.parametrize("switched_off", ["context", "model", "statistics"])
def test_databases_can_be_switched_off(switched_off: str) -> None:
    resources = make_resources([5, 6, 5, 7], statistics=[[5, 20, 21]])
    for is_on in (True, False):
        drafter = Hierarchy(resources, HierarchyOptions.model_validate({switched_off: is_on}))
        trees = generate(drafter, make_sequence([5, 30, 5]), [5, 9, 5, 9], 40)
        labels = {source.label for tree in trees for source in tree.sources[1:]}
        assert (switched_off in labels) is is_on


def test_namespace_drafts_from_its_own_text_only() -> None:
    """Every candidate of another tenant's text is unknown here, whatever the budget."""
    database = ModelDatabase(1 << 20)
    database.insert("theirs", PHRASE * 3)
    for namespace in ("theirs", "ours"):
        drafter = Hierarchy(DraftResources(VOCAB_SIZE, database))
        seq = make_sequence([1, 2, 11, 12, 13], namespace=namespace)
        trees = generate(drafter, seq, [14, 2, 1, 11, 12], 64)
        drafted = {token for tree in trees for token in tree.token_ids[1:]}
        assert (drafted <= {1, 2, 11, 12, 13, 14}) is (namespace == "ours")


def test_other_models_rank_below() -> None:
    """``draft_from`` is used where the own database knows nothing, and trusted as it is right."""
    other = ModelDatabase(1 << 20)
    other.apply("default", [PHRASE, PHRASE])
    resources = DraftResources(VOCAB_SIZE, ModelDatabase(1 << 20), None, (other,))
    drafter = Hierarchy(resources)
    firsts = []
    for _ in range(20):
        seq = make_sequence([1])
        drafter.start(seq)
        follow(drafter, seq, DraftTree(1, 0), PHRASE[:1])
        tree = propose(drafter, seq)
        assert 12 in [path[0] for path in paths(tree)]
        firsts.append((tree.token_ids[1], tree.sources[1]))
        follow(drafter, seq, tree, PHRASE[1:])
        drafter.finish(seq)
    assert firsts[-1] == (12, Source.MODEL)


def test_other_models_may_grow_while_a_request_runs() -> None:
    """Their tables move when they grow; a running request follows."""
    other = ModelDatabase(1 << 24)
    other.insert("default", PHRASE)
    drafter = Hierarchy(DraftResources(VOCAB_SIZE, draft_from=(other,)))
    seq = make_sequence([1, 2, 3])
    drafter.start(seq)
    rng = np.random.default_rng(0)
    for _ in range(30):
        other.insert("default", rng.integers(0, VOCAB_SIZE, 500).tolist())
    latest = rng.integers(0, VOCAB_SIZE, 30).tolist()
    other.insert("default", latest)
    for token in latest[:4]:
        seq.token_ids.append(token)
        drafter.observe(seq, DraftTree(0, 0), Acceptance((0,), (token,)), None)
    assert latest[4:5] in [path[:1] for path in paths(propose(drafter, seq))]


def test_text_of_another_request_is_seen_as_soon_as_it_is_recorded() -> None:
    database = ModelDatabase(1 << 20)
    drafter = Hierarchy(DraftResources(VOCAB_SIZE, database))
    seq = make_sequence([1])
    drafter.start(seq)
    follow(drafter, seq, DraftTree(1, 0), PHRASE[:2])
    assert 13 not in propose(drafter, seq).token_ids
    database.insert("default", PHRASE)
    assert 13 in propose(drafter, seq).token_ids


def test_concurrent_requests_see_each_others_output_at_once() -> None:
    """The second of two answers to one prompt copies the first, which is still running."""
    database = ModelDatabase(1 << 20)
    drafter = Hierarchy(DraftResources(VOCAB_SIZE, database))
    first, second = make_sequence([1, 2]), make_sequence([1, 2])
    drafter.start(first)
    follow(drafter, first, DraftTree(2, 0), PHRASE[:1])
    assert database.num_tokens == 0, "nobody else is there to read it"
    drafter.start(second)
    for token in PHRASE[1:]:
        follow(drafter, first, DraftTree(2, 0), [token])
    follow(drafter, second, DraftTree(2, 0), PHRASE[:1])
    tree = propose(drafter, second)
    assert PHRASE[1:4] in [path[:3] for path in paths(tree)]
    assert Source.MODEL in tree.sources
    drafter.finish(first)
    drafter.finish(second)


def test_floor_and_small_budgets() -> None:
    resources = make_resources([5, 6, 7, 8] * 5)
    drafter = Hierarchy(resources, HierarchyOptions(min_score=0.2))
    trees = generate(drafter, make_sequence([5, 6, 7]), [8, 5, 6, 7], 32)
    assert all(score > 0.2 for tree in trees for score in tree.scores)
    seq = make_sequence([5, 6])
    drafter.start(seq)
    assert propose(drafter, seq, 0).num_draft_tokens == 0
    assert max(propose(drafter, seq, 8, max_depth=1).depths) <= 1


def test_nodes_that_would_be_cut_are_not_proposed() -> None:
    """A tree that says from which score on it keeps nodes gets those of the same ones, but for the
    likely ones behind a node that is hardly above it."""
    floor = 0.1
    drafter = Hierarchy(make_resources([5, 6, 7, 8] * 5, [5, 6, 9, 10] * 2))
    seq = make_sequence([5, 6])
    drafter.start(seq)
    whole, least = DraftTree(6, 16, 16), DraftTree(6, 16, 16, min_score=floor)
    drafter.propose(seq, whole)
    drafter.propose(seq, least)
    assert 0 < least.num_draft_tokens < whole.num_draft_tokens
    assert whole.scores[-1] <= floor < least.scores[-1]
    expected = {0}
    for node, parent in enumerate(whole.parents[1:], start=1):
        is_expanded = parent in expected and whole.scores[parent] * EXPANSION_BOUND > floor
        if is_expanded and whole.scores[node] > floor:
            expected.add(node)
    assert scores_by_path(least) == {
        path: score
        for node, (path, score) in enumerate(scores_by_path(whole).items())
        if node in expected
    }


@pytest.mark.parametrize("num_certain", [1, 2, 3, 6])
def test_what_is_certain_is_gone_on_behind(num_certain: int) -> None:
    """A tree that begins with a path grows behind its end as it grows behind a text that has those
    tokens, within its budget."""
    trees = []
    for certain in ([], PHRASE[1 : 1 + num_certain]):
        drafter = Hierarchy(make_resources(PHRASE, PHRASE))
        decided = PHRASE[: 1 + num_certain - len(certain)]
        seq = make_sequence([1])
        drafter.start(seq)
        for token_id in decided:
            follow(drafter, seq, DraftTree(seq.token_ids[-1], 0), [token_id])
        tree = DraftTree(decided[-1], 6 + len(certain), 24)
        tree.add_path(certain, Source.GRAMMAR)
        drafter.propose(seq, tree)
        check_tree(tree)
        assert tree.sources[1 : 1 + len(certain)] == [Source.GRAMMAR] * len(certain)
        assert tree.token_ids[1 : 1 + len(certain)] == certain
        assert all(parent >= len(certain) for parent in tree.parents[1 + len(certain) :])
        trees.append(tree)
    plain, behind = trees
    next_token = PHRASE[1 + num_certain]
    assert plain.token_ids[1] == behind.token_ids[1 + num_certain] == next_token
    assert behind.scores[1 + num_certain] == pytest.approx(plain.scores[1], abs=0.2)


def test_nothing_grows_where_what_is_certain_fills_the_tree() -> None:
    drafter = Hierarchy(make_resources(PHRASE, PHRASE))
    seq = make_sequence([1])
    drafter.start(seq)
    tree = DraftTree(1, 2)
    tree.add_path(PHRASE, Source.GRAMMAR)
    drafter.propose(seq, tree)
    assert tree.token_ids == [1, *PHRASE[:2]]


def test_output_beyond_what_was_expected() -> None:
    """A request whose length was not announced may go on for ever."""
    rng = np.random.default_rng(0)
    output = rng.integers(0, VOCAB_SIZE, 3000).tolist()
    drafter = Hierarchy(DraftResources(VOCAB_SIZE))
    for tree in generate(drafter, make_sequence([1, 2, 3]), output, 4):
        check_tree(tree)


def test_look_ups_are_timed_by_source_and_change_nothing() -> None:
    """Of the sources there are; trees and what is learned stay as they were."""
    resources = make_resources(PHRASE, statistics=[PHRASE])
    states = []
    for is_timed in (True, False):
        drafter, seq = Hierarchy(resources), make_sequence([9, *PHRASE, 9, *PHRASE[:3]])
        drafter.start(seq)
        trees = []
        for token_id in PHRASE[3:]:
            if is_timed:
                times_s = drafter.lookup_times_s(seq)
                assert set(times_s) == {Source.CONTEXT, Source.MODEL, Source.STATISTICS}
                assert min(times_s.values()) > 0
            tree = propose(drafter, seq)
            trees.append((tree.token_ids, tree.sources, tree.scores))
            seq.token_ids.append(token_id)
            drafter.observe(seq, tree, Acceptance((0,), (token_id,)), None)
        drafter.finish(seq)
        assert drafter.lookup_times_s(seq) == {}
        states.append((trees, drafter.calibration("default").to_bytes()))
    assert states[0] == states[1]


def test_warm_up_leaves_nothing_behind() -> None:
    drafter = Hierarchy(make_resources())
    drafter.warm_up()
    assert drafter.calibration("default").num_tokens == 0


COMPILED_IN_THE_FIRST_REQUEST = """
import gc
from numba.core.dispatcher import Dispatcher
from hdserve import LLM, SamplingParams
from hdserve.databases.model import ModelDatabase
from hdserve.databases.ngram import MAX_STAMP

def signatures():
    found = [item for item in gc.get_objects() if isinstance(item, Dispatcher)]
    return {item.py_func.__qualname__: len(item.signatures) for item in found}

llm = LLM("hdserve-mini")
before = signatures()
llm.generate(["A table for two", "A train to"], SamplingParams(max_tokens=8, temperature=0.0))
database = ModelDatabase(1 << 18)
for namespace in ("a", "b"):  # which has to give way
    database.insert(namespace, [token * 7919 % 50021 for token in range(20000)])
database.partition("b").table.stamp = MAX_STAMP - 1
database.insert("b", range(20000))
assert database.num_given_up and database.partition("b").table.stamp < MAX_STAMP - 1
changed = {name for name, number in signatures().items() if number != before.get(name)}
assert before and not changed, changed
"""


@pytest.mark.slow
def test_no_request_waits_for_the_compiler() -> None:
    """What two requests at once run is compiled, or loaded, when the engine is made; and what is
    called when a database is full, or old."""
    command = [sys.executable, "-c", COMPILED_IN_THE_FIRST_REQUEST]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


def test_what_running_requests_hold_is_known() -> None:
    """Their contexts while they run, and the memory that waits for the next ones after it."""
    drafter = Hierarchy(make_resources())
    assert drafter.held() == (0, 0)
    sequences = [make_sequence(list(range(size))) for size in (50, 400)]
    sizes = [drafter.held()]
    for seq in sequences:
        drafter.start(seq)
        sizes.append(drafter.held())
    assert sizes == sorted(sizes)
    assert sizes[2].num_entries > 400 * 3
    assert sizes[2].num_bytes - sizes[1].num_bytes > 400 * 64
    for seq in sequences:
        drafter.finish(seq)
    assert drafter.held().num_entries == 0
    assert drafter.held().num_bytes > 0


def test_the_calibration_of_a_request_that_leaves_nothing_behind_is_known() -> None:
    """It is a copy, and goes with the request."""
    held = []
    for is_output_shared in (True, False):
        drafter = Hierarchy(make_resources())
        seq = make_sequence(list(range(50)), is_output_shared=is_output_shared)
        drafter.start(seq)
        held.append(drafter.held().num_bytes)
        drafter.finish(seq)
        held.append(drafter.held().num_bytes)
    assert held[2] - held[0] == drafter.calibration("").num_bytes
    assert held[3] == held[1]


@settings(max_examples=25, deadline=None)
@given(
    outputs=st.lists(SMALL_TEXTS, min_size=2, max_size=4),
    size=st.integers(1, 9),
    namespaces=st.lists(st.sampled_from(["one", "two"]), min_size=4, max_size=4),
)
def test_sequences_learn_together_as_one_by_one(
    outputs: list[list[int]], size: int, namespaces: list[str]
) -> None:
    """Of their own text and of what is learned from it; and others find the same of theirs."""

    def answers(*, is_together: bool) -> tuple[list[DraftTree], ModelDatabase]:
        database = ModelDatabase(1 << 22)
        resources = DraftResources(VOCAB_SIZE, database)
        drafter = Hierarchy(resources, HierarchyOptions(model=False, recycled=False))
        running = []
        for number, (output, namespace) in enumerate(zip(outputs, namespaces, strict=False)):
            seq = make_sequence([1, 2, 3, number], namespace=namespace)
            seq.request_id = str(number)
            drafter.start(seq)
            running.append((seq, output))
        trees = []
        while running:
            verified = []
            for seq, output in running:
                tree = propose(drafter, seq, size)
                acceptance = verify_recorded(tree, output[seq.num_output_tokens :])
                seq.token_ids += acceptance.token_ids
                verified.append(Verified(seq, tree, acceptance, None))
                trees.append(tree)
            if is_together:
                drafter.observe_all(verified)
            else:
                for one in verified:
                    drafter.observe(*one)
            running = [pair for pair in running if pair[0].num_output_tokens < len(pair[1])]
        return trees, database

    together, found = answers(is_together=True)
    alone, wanted = answers(is_together=False)
    assert [(tree.token_ids, tree.scores) for tree in together] == [
        (tree.token_ids, tree.scores) for tree in alone
    ]
    for namespace in ("one", "two"):
        parts = found.partition(namespace), wanted.partition(namespace)
        if parts[0] is None or parts[1] is None:
            assert parts == (None, None)
            continue
        assert np.array_equal(parts[0].table.rows, parts[1].table.rows)
        assert parts[0].num_tokens == parts[1].num_tokens


class ExhaustedDatabase(ModelDatabase):
    """Has no memory for what the model thought likely."""

    def recycling(self, namespace: str, num_new: int) -> RecycledDatabase:
        raise MemoryError


class FlatForward:
    """A forward that finds the first tokens likely after every node of a tree."""

    def __init__(self, tree: DraftTree) -> None:
        self._num_nodes = len(tree)

    def top_tokens(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        shape = self._num_nodes, k
        return np.tile(np.arange(k), (self._num_nodes, 1)), np.zeros(shape, np.float32)

    def hidden(self, node: int) -> object:
        raise NotImplementedError


def test_texts_stay_whole_where_memory_is_short() -> None:
    """Neither a sequence that the drafter could not begin with, nor rows for which there is no
    room, cost others what was decided: the next drafts would be for another place."""
    drafter = Hierarchy(DraftResources(VOCAB_SIZE, ExhaustedDatabase(1 << 22)))
    known, other = make_sequence([1, *PHRASE]), make_sequence([2, 3])
    known.request_id = "known"
    drafter.start(known)
    for token in PHRASE[:4]:
        tree = propose(drafter, known)
        forward = FlatForward(tree)
        for seq in (known, other):
            seq.token_ids.append(token)
        acceptance = Acceptance((0,), (token,))
        unknown = Verified(other, DraftTree(3, 0), acceptance, None)
        with pytest.raises(MemoryError):
            drafter.observe_all([unknown, Verified(known, tree, acceptance, forward)])
    assert paths(propose(drafter, known, 3))[0] == PHRASE[4:7]
    drafter.finish(other)


def test_drafts_go_on_where_a_step_could_not_be_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tokens are in the text again before the next draft; nothing is counted twice."""
    drafter = Hierarchy(make_resources())
    seq = make_sequence([1, *PHRASE, 2], prediction=(3,))
    drafter.start(seq)
    for number, token in enumerate(PHRASE[:6]):
        tree = propose(drafter, seq)
        seq.token_ids.append(token)
        verified = [Verified(seq, tree, Acceptance((0,), (token,)), None)]
        with monkeypatch.context() as patched:
            if number in (3, 5):
                patched.setattr(ContextDatabase, "has_room", _exhausted)
                with pytest.raises(MemoryError):
                    drafter.observe_all(verified)
                continue
            drafter.observe_all(verified)
    assert paths(propose(drafter, seq, 2))[0] == PHRASE[6:]
    assert drafter.calibration("default").num_requests == 1
    drafter.finish(seq)
    assert drafter.calibration("default").num_requests == 0
    assert drafter.held().num_entries == 0


def _exhausted(*_: object) -> bool:
    raise MemoryError

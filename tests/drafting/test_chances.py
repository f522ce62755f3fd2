"""Drafts of sampled requests know the noise of the choices they guess."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hdserve.core import SamplingParams, Sequence, SpeculationParams
from hdserve.drafting.base import DraftResources
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.noise import exponential, noise_word, position_key, sequence_key
from hdserve.tree import Acceptance, DraftTree
from tests.drafting.helpers import scores_by_path

VOCAB_SIZE = 64
NUM_TOKENS = 3000
NUM_LEARNED = 2000
SEED = 11


def followers(token: int) -> tuple[int, int]:
    """What the model thinks likely after ``token``, each with a probability of one half."""
    return (2 * token + 1) % VOCAB_SIZE, (2 * token + 2) % VOCAB_SIZE


def share_guessed(seq: Sequence, num_nodes: int) -> float:
    """Of the last tokens of a long answer, how many the first ``num_nodes`` drafts held; choices
    have the noise of seed ``SEED`` and choice 1."""
    key = sequence_key(SEED, 1)
    drafter = Hierarchy(DraftResources(VOCAB_SIZE))
    drafter.start(seq)
    num_guessed = 0
    for number in range(NUM_TOKENS):
        tree = DraftTree(seq.token_ids[-1], num_nodes, 1)
        drafter.propose(seq, tree)
        here = position_key(key, len(seq.token_ids))
        likely = followers(seq.token_ids[-1])
        token = min(likely, key=lambda token: exponential(noise_word(here, token)))
        num_guessed += number >= NUM_LEARNED and token in tree.token_ids[1:]
        seq.token_ids.append(token)
        drafter.observe(seq, tree, Acceptance((0,), (token,)), None)
    drafter.finish(seq)
    return num_guessed / (NUM_TOKENS - NUM_LEARNED)


def make_sequence(seed: int = SEED, **options: Any) -> Sequence:
    temperature = options.pop("temperature", 1.0)
    params = SamplingParams(seed=seed, temperature=temperature, max_tokens=NUM_TOKENS)
    return Sequence("a", [1, 2, 3], params, choice_index=1, **options)


@pytest.mark.parametrize("prediction", [(), (9, 8, 7, 6, 5)], ids=["", "prediction"])
def test_the_noise_tells_which_of_two_comes(prediction: tuple[int, ...]) -> None:
    """One guess is nearly always right, whatever the text says that others expect."""
    seq = make_sequence(speculation=SpeculationParams(prediction=prediction))
    assert share_guessed(seq, 1) > 0.9


def test_noise_of_another_seed_tells_nothing() -> None:
    """And it is learned that it does, so that both are drafted where there is room for both."""
    assert 0.4 < share_guessed(make_sequence(seed=SEED + 1), 1) < 0.6
    assert share_guessed(make_sequence(seed=SEED + 1), 2) > 0.95


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"recorded_token_ids": (1,)}], ids=["greedy", "recorded"]
)
def test_choices_without_noise_are_guessed_without(options: dict[str, Any]) -> None:
    """Greedy choices, and those that a benchmark repeats."""
    seq = make_sequence()
    drafter = Hierarchy(DraftResources(VOCAB_SIZE))
    trees = []
    for seed in (1, 2):
        seq = make_sequence(seed=seed, **dict(options))
        seq.token_ids = [token % 7 for token in range(200)] + [*range(20), 3, 4]
        drafter.start(seq)
        tree = DraftTree(seq.token_ids[-1], 8)
        drafter.propose(seq, tree)
        trees.append((tree.token_ids, tree.scores))
        drafter.finish(seq)
    assert trees[0] == trees[1]
    assert len(trees[0][0]) > 1


def test_a_floor_leaves_the_scores_above_it_as_they_are() -> None:
    """A candidate's share is one of all, whether or not the others can be drafted."""
    drafter = Hierarchy(DraftResources(VOCAB_SIZE))
    seq = make_sequence()
    for right in np.random.default_rng(0).integers(0, 2, 500):
        seq.token_ids.append(followers(seq.token_ids[-1])[right])
    drafter.start(seq)
    trees = [DraftTree(seq.token_ids[-1], 32, min_score=floor) for floor in (0.0, 0.05, 0.1, 0.2)]
    for tree in trees:
        drafter.propose(seq, tree)
    whole, *others = map(scores_by_path, trees)
    for found in others:
        assert 1 < len(found) < len(whole)
        assert found == {path: whole[path] for path in found}

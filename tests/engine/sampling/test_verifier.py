"""The verification rule: the walk follows the choices, and the distribution is the target's."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdserve import core
from hdserve.core import SamplingParams, Source
from hdserve.engine.sampling.sampler import choose, filtered_probabilities
from hdserve.engine.sampling.verifier import verify
from hdserve.noise import position_key, sequence_key
from hdserve.tree import DraftTree
from tests.drafters import JunkDrafter
from tests.engines import make_engine, run
from tests.goodness import chi_square_p_value
from tests.models import VOCAB_SIZE as MODEL_VOCAB_SIZE
from tests.models import make_model

NUM_DRAWS = 40_000
MIN_P_VALUE = 1e-4
VOCAB_SIZE = 5
NUM_TOKENS = 3
PARAMS = SamplingParams(temperature=0.8, top_k=4, top_p=0.97)

DRAFTS: dict[str, list[list[int]]] = {
    "none": [],
    "one token": [[0]],
    "one path": [[1, 2, 3]],
    "shared beginnings": [[0, 1, 2], [0, 1, 3], [0, 2], [4, 4, 4]],
    "every token": [[token] for token in range(VOCAB_SIZE)],
    "everything": [list(path) for path in itertools.product(range(VOCAB_SIZE), repeat=2)],
}

Draws = list[tuple[int, ...]]


@given(data=st.data())
def test_the_walk_follows_the_choices(data: st.DataObject) -> None:
    """The accepted path spells the choices, it goes as far as the tree does, and ``choose`` is
    called for its nodes alone, once and in order."""
    tree = DraftTree(9, 12)
    for _ in range(data.draw(st.integers(0, 12))):
        parent = data.draw(st.integers(0, len(tree) - 1))
        tree.add_node(parent, data.draw(st.integers(0, 2)), Source.OTHER)
    choices = data.draw(st.lists(st.integers(0, 3), min_size=len(tree), max_size=len(tree)))
    asked: list[int] = []

    def choose_at(node: int) -> int:
        asked.append(node)
        return choices[node]

    acceptance = verify(tree, choose_at)
    assert list(acceptance.path) == asked
    assert list(acceptance.token_ids) == [choices[node] for node in asked]
    assert [tree.token_ids[node] for node in acceptance.path[1:]] == acceptance.token_ids[:-1]
    assert tree.path_to(acceptance.path[-1]) == acceptance.path
    assert tree.child(acceptance.path[-1], acceptance.token_ids[-1]) is None


def test_no_draft_is_one_token() -> None:
    """A tree of one node is plain decoding: one choice, one token."""
    acceptance = verify(DraftTree(9, 0), lambda node: 4)
    assert (acceptance.path, acceptance.token_ids) == ([0], [4])


def target_logits() -> torch.Tensor:
    """``[VOCAB_SIZE + 1, VOCAB_SIZE]``: a target that depends on the token before; the last row
    is for the first token."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(VOCAB_SIZE + 1, VOCAB_SIZE, generator=generator) * 1.3


def exact_distribution() -> dict[tuple[int, ...], float]:
    """The probability of each of the first ``NUM_TOKENS`` tokens, from the definition."""
    rows = filtered_probabilities(target_logits(), PARAMS)
    rows = rows / rows.sum(dim=-1, keepdim=True)
    found = {}
    for tokens in itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS):
        probability = 1.0
        for before, token in itertools.pairwise((VOCAB_SIZE, *tokens)):
            probability *= float(rows[before, token])
        if probability:
            found[tokens] = probability
    return found


@functools.cache
def choices_by_position() -> list[list[list[int]]]:
    """``[position][token before][seed]``: what the real sampler chooses, all seeds in one call."""
    found = []
    for position in range(NUM_TOKENS):
        keys = [position_key(sequence_key(seed, 0), position) for seed in range(NUM_DRAWS)]
        found.append(
            [choose(row.expand(NUM_DRAWS, -1), PARAMS, keys).tolist() for row in target_logits()]
        )
    return found


def draft_tree(tokens: tuple[int, ...], drafts: list[list[int]]) -> DraftTree:
    """The tree a fixed drafter proposes, whatever was decided before."""
    tree = DraftTree(tokens[-1] if tokens else VOCAB_SIZE, 30)
    for path in drafts:
        tree.add_path(path, Source.OTHER)
    return tree


@functools.cache
def draw_by_walking(drafts: str) -> Draws:
    """The first tokens of ``NUM_DRAWS`` requests, step by step through the real walk."""
    tree = draft_tree((), DRAFTS[drafts])
    choices = choices_by_position()
    draws = []
    for seed in range(NUM_DRAWS):
        tokens: list[int] = []
        while len(tokens) < NUM_TOKENS:
            tree.token_ids[0] = tokens[-1] if tokens else VOCAB_SIZE
            start = len(tokens)

            def choose_at(node: int, start: int = start, seed: int = seed) -> int:
                position = start + tree.depths[node]
                if position >= NUM_TOKENS:
                    return 0
                return choices[position][tree.token_ids[node]][seed]

            tokens += verify(tree, choose_at).token_ids
        draws.append(tuple(tokens[:NUM_TOKENS]))
    return draws


def draw_with_resampling(drafts: list[list[int]]) -> Draws:
    """The same with a wrong rule: when a choice is not among the drafts, choose once more."""
    tree = draft_tree((), drafts)
    choices = choices_by_position()
    draws = []
    for seed in range(NUM_DRAWS):
        tokens: list[int] = []
        node: int | None = 0
        while len(tokens) < NUM_TOKENS:
            before = tokens[-1] if tokens else VOCAB_SIZE
            token = choices[len(tokens)][before][seed]
            node = None if node is None else tree.child(node, token)
            if node is None:
                token = choices[len(tokens)][before][seed - NUM_DRAWS // 2]
                node = 0
            tokens.append(token)
        draws.append(tuple(tokens))
    return draws


def p_value(draws: Draws) -> float:
    """How likely draws as far from the exact target as these are."""
    exact = exact_distribution()
    assert set(draws) <= exact.keys(), "a token of probability zero was drawn"
    counts = Counter(draws)
    return chi_square_p_value([counts[key] for key in exact], list(exact.values()))


@pytest.mark.parametrize("drafts", DRAFTS)
def test_the_distribution_is_the_targets(drafts: str) -> None:
    """40,000 draws of three tokens: with any drafts they are distributed as the target says."""
    assert p_value(draw_by_walking(drafts)) > MIN_P_VALUE


@pytest.mark.parametrize("drafts", ["one token", "one path", "shared beginnings"])
def test_a_wrong_rule_fails(drafts: str) -> None:
    """The test above can fail: choosing once more on rejection favours the drafts, and shows."""
    assert p_value(draw_with_resampling(DRAFTS[drafts])) < MIN_P_VALUE


def test_drafts_do_not_change_a_draw() -> None:
    """Not only the distribution: every single draw is the same with any drafts."""
    assert draw_by_walking("none") == draw_by_walking("shared beginnings")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_distribution_through_the_engine() -> None:
    """40,000 draws of two tokens through a real model, cache and tree forward are distributed as
    the model says."""
    model = make_model()
    prompt = [3, 1, 4, 1, 5]
    with torch.no_grad():
        extended = torch.tensor([[*prompt, token] for token in range(MODEL_VOCAB_SIZE)])
        logits = model(extended).logits.float()
    first = filtered_probabilities(logits[0, -2:-1], SamplingParams())
    exact = (first[0, :, None] * filtered_probabilities(logits[:, -1], SamplingParams())).flatten()
    engine = make_engine(
        [JunkDrafter(MODEL_VOCAB_SIZE)],
        model=model,
        max_draft_tokens=4,
        max_num_sequences=64,
    )
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, NUM_DRAWS, 1000):
        sequences = [
            core.Sequence(str(seed), list(prompt), SamplingParams(seed=seed, max_tokens=2))
            for seed in range(start, start + 1000)
        ]
        run(engine, sequences)
        counts.update(tuple(seq.output_token_ids) for seq in sequences)
    pairs = itertools.product(range(MODEL_VOCAB_SIZE), repeat=2)
    assert engine.stats.drafts.num_accepted_tokens > 100
    assert chi_square_p_value([counts[pair] for pair in pairs], exact.tolist()) > MIN_P_VALUE

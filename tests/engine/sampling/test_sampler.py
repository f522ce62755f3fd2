"""A choice follows the filtered distribution, and nothing but its own inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hdserve.core import SamplingParams
from hdserve.engine.sampling.sampler import choose, choose_checked, filtered_probabilities
from hdserve.noise import exponential, noise_word, position_key, sequence_key
from tests.engine.reads import Reads
from tests.goodness import chi_square_p_value

CPU = torch.device("cpu")
MIN_P_VALUE = 1e-4

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.9},
    "top_k": {"top_k": 7},
    "top_k of all": {"top_k": 10**6},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-9},
    "no top_p": {"top_p": 0},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
}


LAYOUTS = ["rows", "columns"]
"""Rows in one piece are drawn from by a kernel, others by torch."""


def laid_out(logits: torch.Tensor, layout: str) -> torch.Tensor:
    return logits.contiguous() if layout == "rows" else logits.t().contiguous().t()


def random_logits(num_rows: int, vocab_size: int, spread: float = 2.5, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The normalised distribution by transformers' own filters."""
    warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    scores = LogitsProcessorList(warpers)(torch.zeros(len(logits), 1).long(), logits.double())
    result: torch.Tensor = scores.softmax(dim=-1)
    return result


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab_size", [5, 61, 3000])
def test_filters_equal_those_of_transformers(name: str, vocab_size: int) -> None:
    """Temperature, top-k, top-p and min-p keep the tokens, and give the odds, that transformers'
    own filters do."""
    params = SamplingParams(**FILTERS[name])
    logits = random_logits(6, vocab_size)
    found = filtered_probabilities(logits, params)
    normalised = found / found.sum(dim=-1, keepdim=True)
    wanted = warped(logits, params)
    assert torch.equal(normalised > 0, wanted > 0)
    torch.testing.assert_close(normalised, wanted, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("vocab_size", [257, 5000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_of_a_long_tail(vocab_size: int, top_p: float) -> None:
    """A nucleus of more than the 256 candidates that are looked at first is found all the same,
    also beside rows whose nucleus is small."""
    flat, peaked = random_logits(3, vocab_size, spread=0.01), random_logits(3, vocab_size, 9.0)
    logits = torch.cat([flat, peaked])[[0, 3, 1, 4, 2, 5]]
    params = SamplingParams(top_p=top_p)
    found = filtered_probabilities(logits, params)
    assert torch.equal(found > 0, warped(logits, params) > 0)
    if top_p * vocab_size > 260:
        assert int((found[0] > 0).sum()) > 256


@pytest.mark.parametrize("top_p", [1 - 3e-8, 1 - 1e-8, 1 - 1e-9])
def test_a_filter_that_keeps_all_but_nothing_drops_no_token(top_p: float) -> None:
    """Rounding can make all tokens together less than the share that is asked for."""
    params = SamplingParams(top_p=top_p)
    for row in random_logits(40, 8, spread=0.03):
        chosen = choose(row.repeat(200, 1), params, [position_key(3, n) for n in range(200)])
        kept = filtered_probabilities(row[None], params)[0] > 0
        assert torch.equal(chosen.unique(), kept.nonzero()[:, 0])


def test_equally_likely_tokens_are_kept_together() -> None:
    """A filter that would cut between equally likely tokens keeps them all."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.7)):
        kept = (filtered_probabilities(logits, params) > 0)[0].tolist()
        assert kept == [False, True, True, True, False]


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab_size", [5, 61, 64, 3000, 32_001])
def test_kernel_and_torch_choose_the_same(name: str, vocab_size: int) -> None:
    """With each filter, whether the tokens are about equally likely or one is by far the
    likeliest; some tokens are forbidden."""
    params, num_rows = SamplingParams(**FILTERS[name]), 60
    keys = [position_key(9, row) for row in range(num_rows)]
    for spread in (0.01, 2.5, 30.0):
        logits = random_logits(num_rows, vocab_size, spread)
        logits[:, 1::7] = -math.inf
        found = [choose(laid_out(logits, layout), params, keys) for layout in LAYOUTS]
        assert torch.equal(found[0], found[1]), spread
        assert not torch.isin(found[0], torch.arange(1, vocab_size, 7)).any(), spread


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.7}], ids=str)
def test_all_kept_tokens_can_be_chosen(options: dict[str, Any]) -> None:
    """Of tokens as likely as the last one that is kept the kernel drops none; it keeps no other."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    keys = [position_key(1, number) for number in range(200)]
    rows = logits.repeat(len(keys), 1)
    assert set(choose(rows, SamplingParams(**options), keys).tolist()) == {1, 2, 3}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-40, 1e-6])
def test_tiny_temperatures_are_nearly_greedy(temperature: float, layout: str) -> None:
    """A temperature next to zero picks the likeliest token; it does not overflow."""
    logits = laid_out(random_logits(20, 61), layout)
    for options in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        params = SamplingParams(temperature=temperature, **options)
        chosen = choose(logits, params, list(range(20)))
        assert torch.equal(chosen, logits.argmax(dim=-1))


def test_greedy_takes_the_first_of_equals() -> None:
    """Ties are broken by token id, so that a choice is the same everywhere."""
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert choose(logits, SamplingParams(temperature=0.0), []).tolist() == [1, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab_size", [61, 8192])
def test_rows_do_not_depend_on_each_other(name: str, vocab_size: int, layout: str) -> None:
    """A row among others gives bitwise what it gives alone, anywhere in the batch."""
    params = SamplingParams(**FILTERS[name])
    logits = torch.cat(
        [random_logits(8, vocab_size), random_logits(9, vocab_size, spread=0.01, seed=1)]
    )[torch.randperm(17, generator=torch.Generator().manual_seed(2))]
    logits = laid_out(logits, layout)
    keys = [position_key(5, row) for row in range(17)]
    together = filtered_probabilities(logits, params)
    chosen = choose(logits, params, keys)
    for row in range(17):
        alone = filtered_probabilities(logits[row : row + 1], params)
        assert torch.equal(alone[0], together[row])
        one = laid_out(logits[[row, row]], layout)
        assert choose(one, params, [keys[row]] * 2).tolist() == [int(chosen[row])] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FILTERS)
def test_choices_follow_the_distribution(name: str, layout: str) -> None:
    """40,000 choices with each filter are distributed as it says; what it drops never comes."""
    params = SamplingParams(**FILTERS[name])
    logits = random_logits(1, 61, spread=1.5, seed=3)
    keys = [position_key(sequence_key(seed, 0), 0) for seed in range(40_000)]
    chosen = choose(laid_out(logits.expand(len(keys), -1), layout), params, keys)
    counts = chosen.bincount(minlength=61)
    wanted = warped(logits, params)[0]
    assert not counts[wanted == 0].any()
    possible = (wanted > 0).nonzero()[:, 0]
    if len(possible) > 1:
        p_value = chi_square_p_value(counts[possible].tolist(), wanted[possible].tolist())
        assert p_value > MIN_P_VALUE


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab_size", [3, 61, 50_000])
def test_the_first_to_arrive_is_chosen(vocab_size: int, name: str, layout: str) -> None:
    """From the definition: the token whose noise over its weight is least."""
    params, keys = SamplingParams(**FILTERS[name]), [position_key(3, row) for row in range(6)]
    logits = random_logits(len(keys), vocab_size, spread=1.5)
    weights = filtered_probabilities(logits, params).numpy()
    chosen = choose(laid_out(logits, layout), params, keys).tolist()
    for row, key in enumerate(keys):
        possible = np.flatnonzero(weights[row]).tolist()
        times = [exponential(noise_word(key, token)) / weights[row, token] for token in possible]
        assert chosen[row] == possible[int(np.argmin(times))]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_that_are_no_numbers_harm_no_other_row(layout: str, value: float) -> None:
    """A model that overflowed for one sequence gives it a token of the vocabulary or none."""
    logits = random_logits(3, 61)
    logits[1] = value
    for params in (SamplingParams(), SamplingParams(top_p=0.9, top_k=5), SamplingParams(min_p=0.1)):
        chosen = choose(laid_out(logits, layout), params, [3, 5, 7])
        assert -1 <= int(chosen[1]) < 61
        for row in (0, 2):
            two = laid_out(logits[[row, row]], layout)
            alone = choose(two, params, [[3, 5, 7][row]] * 2)
            assert alone.tolist() == [int(chosen[row])] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_beside_a_logit_that_is_no_number_none_is_chosen_that_is_one(
    layout: str, value: float
) -> None:
    logits = random_logits(20, 61)
    logits[:, 40] = value
    for params in (SamplingParams(), SamplingParams(top_p=0.9, top_k=5), SamplingParams(min_p=0.1)):
        chosen = choose(laid_out(logits, layout), params, list(range(20))).tolist()
        if value == math.inf:
            assert set(chosen) <= {-1, 40}
        assert -1 <= min(chosen) <= max(chosen) < 61


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=3)])
def test_a_choice_knows_whether_it_may_be(dtype: torch.dtype, params: SamplingParams) -> None:
    """By the kernel or without it: of what is forbidden, or was no number, nothing may be."""
    logits = random_logits(1, 61).to(dtype)
    for key in range(20):
        token, may_be_chosen = choose_checked(logits, logits, params, key)
        assert may_be_chosen
        assert [token] == choose(logits, params, [key]).tolist()
    least = int(logits.argmin())
    only = torch.full_like(logits, -torch.inf)
    assert not choose_checked(logits, only, params, 7)[1]
    only[0, least] = torch.inf if params.is_greedy else 5.0
    assert choose_checked(logits, only, params, 7) == (least, True)
    logits[0, least] = torch.nan
    assert choose_checked(logits, only, params, 7) == (least, False)


def test_a_choice_is_read_once() -> None:
    """Each number that is read of its own would wait for a GPU."""
    logits = random_logits(1, 61).double()
    with Reads() as reads:
        choose_checked(logits, logits * 2.0, SamplingParams(top_k=3), 5)
    assert reads.number == 0

"""The pace of prompts: what a step of decoding takes is their measure, on any device."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hdserve.engine.scheduling.prefill_pace import MIN_TOKENS, PrefillPace

DECODING_S = 0.010


def run(
    pace: PrefillPace,
    num_steps: int,
    cost_s: Callable[[int], float],
    decoding_s: float = DECODING_S,
) -> list[int]:
    """Prompt tokens of each step of a prompt that never ends, beside a sequence that decodes."""
    found = []
    for _ in range(num_steps):
        num_tokens = pace.num_tokens(1, 1)
        pace.observe(1, num_tokens, decoding_s + cost_s(num_tokens))
        found.append(num_tokens)
    return found


def test_alone_a_prompt_takes_all_it_can() -> None:
    """Nobody waits, so nothing is held back."""
    pace = PrefillPace(256, 2.0)
    assert pace.num_tokens(0, 1) == 256
    run(pace, 20, lambda num_tokens: 0.001 * num_tokens)
    assert pace.num_tokens(0, 1) == 256


def test_without_a_slowdown_nothing_holds_prompts_back() -> None:
    """Nor is anything measured: not one step leaves them out."""
    found = run(PrefillPace(256, None), 50, lambda num_tokens: 0.1 * num_tokens)
    assert set(found) == {256}


@pytest.mark.parametrize("token_ms", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("slowdown", [1.5, 2.0, 3.0])
def test_a_step_takes_as_much_longer_as_allowed(token_ms: float, slowdown: float) -> None:
    """Within a few steps, whatever a token costs."""
    pace = PrefillPace(256, slowdown)
    *_, last = run(pace, 20, lambda num_tokens: token_ms / 1000 * num_tokens)
    wanted = (slowdown - 1) * DECODING_S / (token_ms / 1000)
    assert last == pytest.approx(min(max(wanted, MIN_TOKENS), 256), abs=1)


def test_it_follows_a_prompt_into_its_depth() -> None:
    """Tokens that cost more come fewer at a time, down to the least."""
    pace, depth, taken = PrefillPace(256, 2.0), 0, []
    for _ in range(3000):
        num_tokens = pace.num_tokens(1, 1)
        seconds = num_tokens * (50e-6 + depth * 10e-9)
        pace.observe(1, num_tokens, DECODING_S + seconds)
        depth += num_tokens
        if num_tokens > MIN_TOKENS:
            taken.append(seconds)
    assert num_tokens == MIN_TOKENS
    assert max(taken[10:]) < 1.1 * DECODING_S


def test_each_prompt_that_has_begun_gets_as_much() -> None:
    """Three: three times the time, however many decode, and one for one again after it."""
    pace = PrefillPace(1000, 2.0)
    token_s = 0.0001
    run(pace, 20, lambda num_tokens: token_s * num_tokens)
    assert pace.num_tokens(1, 1) == pytest.approx(100, abs=1)
    assert pace.num_tokens(1, 3) == pytest.approx(300, abs=3)
    for _ in range(3):
        pace.observe(6, 0, DECODING_S)
    assert pace.num_tokens(6, 1) == pytest.approx(100, abs=1)
    assert pace.num_tokens(6, 3) == pytest.approx(300, abs=3)


def test_many_that_decode_have_their_own_measure() -> None:
    """What one takes says nothing of what thirty take, from the first step on."""
    pace = PrefillPace(2048, 2.0)
    token_s = 0.00002
    run(pace, 50, lambda num_tokens: token_s * num_tokens, decoding_s=0.001)
    assert pace.num_tokens(1, 1) == pytest.approx(50, abs=2)
    for _ in range(3):
        assert pace.num_tokens(30, 1) == 0
        pace.observe(30, 0, 0.030)
    assert pace.num_tokens(30, 1) == pytest.approx(1500, abs=60)
    assert pace.num_tokens(1, 1) == pytest.approx(50, abs=2)


@pytest.mark.parametrize("chunk_tokens", [20, 40, 150])
@pytest.mark.parametrize("seed", range(5))
def test_short_chunks_leave_the_next_as_it_is(chunk_tokens: int, seed: int) -> None:
    """Many short prompts, in steps that differ by more than those take, for as long as they come:
    the next long prompt gets about what it would have got without them."""
    generator = random.Random(seed)
    pace = PrefillPace(2048, 2.0)
    run(pace, 40, lambda num_tokens: 0.00002 * num_tokens)
    for _ in range(5000):
        decoding_s = DECODING_S * generator.uniform(0.5, 1.5)
        pace.observe(1, chunk_tokens, decoding_s + chunk_tokens * 0.00002)
    pace.observe(1, 0, DECODING_S)
    assert 500 / 2.5 < pace.num_tokens(1, 1) < 500 * 2.5


@pytest.mark.parametrize("chunk_tokens", [20, 100])
def test_short_chunks_that_cost_nothing_leave_the_next_as_it_is(chunk_tokens: int) -> None:
    """As a model takes about as long for a few tokens more, but not for many; now and then a step
    is slow for another reason."""
    pace = PrefillPace(2048, 2.0)
    *_, before = run(pace, 40, lambda num_tokens: 0.00002 * num_tokens)
    for slowness in (1.0, 1.0, 1.0, 3.0) * 1250:
        pace.observe(1, chunk_tokens, DECODING_S * slowness)
    pace.observe(1, 0, DECODING_S)
    assert pace.num_tokens(1, 1) == pytest.approx(before, abs=1)


def test_short_chunks_whose_steps_take_far_too_long_make_the_next_shorter() -> None:
    """As of turns whose beginning is cached: their few tokens attend to all of it."""
    pace = PrefillPace(2048, 2.0)
    run(pace, 40, lambda num_tokens: 0.00002 * num_tokens)
    for _ in range(20):
        num_tokens = min(pace.num_tokens(1, 1), 100)
        pace.observe(1, num_tokens, DECODING_S + 0.0004 * num_tokens)
    pace.observe(1, 0, DECODING_S)
    assert pace.num_tokens(1, 1) == pytest.approx(25, abs=1)


def test_other_steps_are_measured_anew() -> None:
    """Where forwards take something else from now on, the next steps leave prompts out."""
    pace = PrefillPace(256, 2.0)
    run(pace, 50, lambda num_tokens: 0.0002 * num_tokens)
    pace.reset()
    found = run(pace, 20, lambda num_tokens: 0.0001 * num_tokens, decoding_s=0.005)
    assert found[:3] == [0, 0, 0]
    assert found[-1] == pytest.approx(50, abs=2)


def test_dear_tokens_come_a_few_at_a_time() -> None:
    """A prompt always goes on, even where the least of it makes a step long."""
    pace = PrefillPace(256, 2.0)
    found = run(pace, 50, lambda num_tokens: 0.1 * num_tokens)
    assert set(found) == {0, MIN_TOKENS}


def test_a_chunk_is_never_larger_than_the_most() -> None:
    """Not even while prompts cost nothing at all, nor with a most below the least."""
    assert max(run(PrefillPace(40, 2.0), 50, lambda _: 0.0)) == 40
    assert max(run(PrefillPace(4, 2.0), 50, lambda _: 0.0)) == 4


def test_the_measure_is_taken_anew() -> None:
    """Three steps and one in 33 after them leave prompts out: decoding may take longer by now."""
    pace = PrefillPace(256, 2.0)
    found = run(pace, 99, lambda num_tokens: 0.0002 * num_tokens)
    assert [step for step, num_tokens in enumerate(found) if num_tokens == 0] == [0, 1, 2, 35, 68]
    *_, last = run(pace, 75, lambda num_tokens: 0.0002 * num_tokens, decoding_s=0.020)
    assert last == pytest.approx(100, abs=2)


def test_the_end_of_a_prompt_says_nothing_of_its_middle() -> None:
    """A short rest is quickly done, which is no reason for longer chunks."""
    pace = PrefillPace(256, 2.0)
    before = run(pace, 20, lambda num_tokens: 0.0002 * num_tokens)[-1]
    pace.observe(1, 3, DECODING_S + 0.0006)
    assert pace.num_tokens(1, 1) == before


@pytest.mark.parametrize("stalled_s", [0.05, 1.0, 30.0])
def test_one_slow_step_does_not_let_prompts_have_all(stalled_s: float) -> None:
    pace = PrefillPace(512, 2.0)
    run(pace, 50, lambda num_tokens: 0.0002 * num_tokens)
    pace.observe(1, 0, stalled_s)
    found = run(pace, 200, lambda num_tokens: 0.0002 * num_tokens)
    assert max(found) <= 2 * 50
    assert max(found[100:]) == pytest.approx(50, abs=8)

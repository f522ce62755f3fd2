"""What a drafted token takes beside forwards, learned from steps of different numbers of them."""

from __future__ import annotations

import random

import pytest

from hdserve.drafting.draft_price import DraftPrice


def learn(
    price: DraftPrice, num_steps: int, token_s: float, *, most: int = 8, noise: float = 0.0
) -> None:
    """Steps of 0 to ``most`` drafts, of which each takes ``token_s`` and a step 0.001."""
    generator = random.Random(0)
    for _ in range(num_steps):
        num_drafts = generator.randint(0, most)
        error = 1.0 + generator.uniform(-noise, noise)
        price.add(num_drafts, (0.001 + token_s * num_drafts) * error, 0.0)


@pytest.mark.parametrize("token_s", [0.0, 1e-5, 1e-4, 1e-3])
def test_it_is_what_a_token_takes(token_s: float) -> None:
    """Whatever a step takes anyway, in steps that differ by a tenth."""
    price = DraftPrice()
    assert price.seconds(has_prompts=False) == 0.0
    learn(price, 200, token_s, noise=0.1)
    assert price.seconds(has_prompts=False) == pytest.approx(token_s, rel=0.15, abs=3e-6)


def test_steps_with_prompts_are_known_by_themselves() -> None:
    """They take longer and draft less, which says nothing of a draft; what forwards take more is
    the same for both, and so is the rest before there were any."""
    price = DraftPrice()
    for step in range(200):
        price.add(step % 9, 0.001 + 1e-4 * (step % 9), 2e-4 * (step % 9))
    assert price.beside_forward_s(has_prompts=True) == pytest.approx(1e-4, rel=0.1)
    for step in range(200):
        price.add(step % 3, 0.101 + 3e-4 * (step % 3), None)
    assert price.beside_forward_s(has_prompts=False) == pytest.approx(1e-4, rel=0.1)
    assert price.beside_forward_s(has_prompts=True) == pytest.approx(3e-4, rel=0.1)
    assert price.seconds(has_prompts=False) == pytest.approx(3e-4, rel=0.1)
    assert price.seconds(has_prompts=True) == pytest.approx(5e-4, rel=0.1)


def test_what_is_not_seen_any_more_fades() -> None:
    """To nothing in the end; new steps are soon believed then."""
    price = DraftPrice()
    learn(price, 300, 1e-3, noise=0.1)
    prices = []
    for _ in range(40):
        price.fade(400)
        prices.append(price.seconds(has_prompts=False))
    assert prices == sorted(prices, reverse=True)
    assert prices[4] > 8e-4
    assert prices[-1] < 2e-4
    learn(price, 30, 5e-4, noise=0.1)
    assert price.seconds(has_prompts=False) == pytest.approx(5e-4, rel=0.15)


def test_it_is_no_larger_than_is_sure() -> None:
    """Steps of 20 ms that differ by 3 among themselves say nothing of tokens that take 0.01."""
    prices = []
    generator = random.Random(0)
    price = DraftPrice()
    for _ in range(2000):
        num_drafts = 10 * (generator.random() < 0.9)
        price.add(num_drafts, 0.0, 1e-5 * num_drafts + generator.gauss(1e-3, 3e-3))
        prices.append(price.seconds(has_prompts=False))
    assert sorted(prices)[len(prices) // 2] < 2e-5


def test_it_follows() -> None:
    """Half a thousand steps later nothing is left of what it was."""
    price = DraftPrice()
    learn(price, 200, 1e-3)
    learn(price, 500, 1e-4)
    assert price.seconds(has_prompts=False) == pytest.approx(1e-4, rel=0.15)


def test_nothing_is_made_of_steps_that_are_alike() -> None:
    """With as many drafts in every step, nobody knows what one takes; it is not made up."""
    price = DraftPrice()
    generator = random.Random(0)
    for _ in range(300):
        price.add(5.0, 0.001 * generator.uniform(0.5, 1.5), 0.001 * generator.uniform(0.5, 1.5))
    assert price.seconds(has_prompts=False) == 0.0


def test_tokens_do_not_earn() -> None:
    """A step that happens to take less with more drafts is no reason for more of them."""
    price = DraftPrice()
    for step in range(100):
        price.add(step % 5, 0.01 - 0.001 * (step % 5), 0.01 - 0.001 * (step % 5))
    assert price.seconds(has_prompts=False) == 0.0


@pytest.mark.parametrize("num_before", [0, 3, 20, 200])
def test_a_stalled_step_is_worth_little(num_before: int) -> None:
    """A second in which the machine did something else is no property of its drafts."""
    price = DraftPrice()
    learn(price, num_before, 1e-4, noise=0.1)
    price.add(8.0, 1.0, 0.0)
    learn(price, 40, 1e-4, noise=0.1)
    assert price.seconds(has_prompts=False) == pytest.approx(1e-4, rel=0.5)


@pytest.mark.parametrize("base_s", [-1e-3, 0.0, 1e-3])
def test_forwards_may_take_less_than_expected(base_s: float) -> None:
    """Errors to both sides, about nothing or less, do not carry the line away."""
    price = DraftPrice()
    generator = random.Random(0)
    for step in range(2000):
        num_drafts = step % 9
        price.add(num_drafts, 0.0, base_s + 1e-4 * num_drafts + generator.uniform(-5e-4, 5e-4))
    assert price.seconds(has_prompts=False) == pytest.approx(1e-4, rel=0.3)


@pytest.mark.parametrize("num_sequences", range(1, 9))
def test_the_first_step_after_a_long_time_without_drafts(num_sequences: int) -> None:
    """Nothing of what was known counts then, but for errors of rounding."""
    for most in range(1, 9):
        price = DraftPrice()
        learn(price, 300, 1e-3, most=most)
        price.fade(1_000_000)
        price.add(1 / num_sequences, 0.001, 0.0)
        assert price.seconds(has_prompts=False) == 0.0

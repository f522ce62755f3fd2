"""One bound for many namespaces, and who gives way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hdserve.databases.byte_budget import MIN_PART_BYTES, ByteBudget


class Part:
    """A namespace of which the size is said."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_limits = 0

    def limit(self, max_bytes: int) -> int:
        self.num_limits += 1
        self.max_bytes = max_bytes
        self.num_bytes = min(self.num_bytes, max_bytes)
        return 0


class StubbornPart(Part):
    """Cannot be given another bound."""

    def limit(self, max_bytes: int) -> int:
        raise MemoryError


def make_budget(max_bytes: int, on_change: Callable[[], None] = lambda: None) -> ByteBudget[Part]:
    return ByteBudget(max_bytes, on_change)


def feed(budget: ByteBudget[Part], namespace: str, num_bytes: int) -> None:
    part = budget.use(namespace, Part)
    part.num_bytes = min(part.max_bytes, part.num_bytes + num_bytes)
    budget.note(namespace)


@pytest.mark.parametrize("first", [700_000, 900_000])
def test_the_largest_gives_way_down_to_the_next(first: int) -> None:
    """What comes all at once takes no more of a namespace than makes both as large."""
    budget = make_budget(1_000_000)
    feed(budget, "first", first)
    feed(budget, "second", 900_000)
    sizes = [part.num_bytes for part in budget]
    assert sum(sizes) <= 1_000_000
    assert max(sizes) - min(sizes) < 100_000


def test_one_that_gave_way_takes_from_another_that_took_what_was_free() -> None:
    """As a new one would."""
    budget = make_budget(1_000_000)
    for _ in range(10):
        for namespace in ("a", "b", "c", "d"):
            feed(budget, namespace, 100_000)
    budget.drop("c")
    budget.drop("d")
    for namespace in ("a", "b"):
        for _ in range(20):
            feed(budget, namespace, 100_000)
    sizes = [part.num_bytes for part in budget]
    assert sum(sizes) <= 1_000_000
    assert max(sizes) - min(sizes) < 200_000


def test_small_ones_are_left_alone() -> None:
    """A namespace is safe from others as long as it is smaller than theirs."""
    budget = make_budget(1_000_000)
    feed(budget, "small", 200_000)
    for namespace in ("a", "b", "c"):
        feed(budget, namespace, 500_000)
    small = budget.get("small")
    assert small is not None
    assert small.num_bytes == 200_000
    assert budget.num_bytes <= 1_000_000
    assert budget.num_dropped == 0


def test_one_that_cannot_be_limited_is_not_lost() -> None:
    """Where there is no memory to let it grow it stays as it was, for this and all later calls."""
    budget = make_budget(1_000_000)
    stubborn = StubbornPart(MIN_PART_BYTES)
    assert budget.use("stubborn", lambda _: stubborn) is stubborn
    stubborn.num_bytes = MIN_PART_BYTES
    budget.note("stubborn")
    with pytest.raises(MemoryError):
        budget.use("stubborn", Part)
    assert budget.namespaces == ("stubborn",)
    feed(budget, "other", 900_000)
    assert budget.num_bytes == 900_000 + MIN_PART_BYTES


@pytest.mark.parametrize("size", [MIN_PART_BYTES + 512, 60_000, 300_000])
def test_few_of_many_that_are_equal_give_way_to_a_text(size: int) -> None:
    """However many there are, a text makes no more than a few smaller, and is one change."""
    changes: list[None] = []
    budget = make_budget(500 * size, lambda: changes.append(None))
    for number in range(500):
        feed(budget, f"first {number}", size)
    for number in range(200):
        num_changes, num_limits = len(changes), count_limits(budget)
        feed(budget, f"second {number}", size)
        assert count_limits(budget) - num_limits <= 7
        assert len(changes) - num_changes <= 2, "one came, others gave way"
        assert budget.num_bytes <= budget.max_bytes
        assert budget.num_bytes == sum(part.num_bytes for part in budget)
    assert (budget.num_dropped > 0) == (size < 2 * MIN_PART_BYTES)


def test_who_gave_way_makes_room_for_more_texts_than_one() -> None:
    changes: list[None] = []
    budget = make_budget(500 * 60_000, lambda: changes.append(None))
    for number in range(500):
        feed(budget, f"{number}", 60_000)
    num_changes = len(changes)
    for number in range(100):
        feed(budget, f"{number}", 2000)
    assert budget.num_bytes <= budget.max_bytes
    assert len(changes) - num_changes < 100 / 4


def count_limits(budget: ByteBudget[Part]) -> int:
    return sum(part.num_limits for part in budget)

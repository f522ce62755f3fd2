"""One bound for many namespaces, and who gives way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hdserve.databases.room import MIN_PART_BYTES, Room


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


def make_room(max_bytes: int, on_change: Callable[[], None] = lambda: None) -> Room[Part]:
    return Room(max_bytes, on_change)


def feed(room: Room[Part], namespace: str, num_bytes: int) -> None:
    part = room.use(namespace, Part)
    part.num_bytes = min(part.max_bytes, part.num_bytes + num_bytes)
    room.note(namespace)


@pytest.mark.parametrize("first", [700_000, 900_000])
def test_the_largest_gives_way_down_to_the_next(first: int) -> None:
    """What comes all at once takes no more of a namespace than makes both as large."""
    room = make_room(1_000_000)
    feed(room, "first", first)
    feed(room, "second", 900_000)
    sizes = [part.num_bytes for part in room]
    assert sum(sizes) <= 1_000_000
    assert max(sizes) - min(sizes) < 100_000


def test_small_ones_are_left_alone() -> None:
    """A namespace is safe from others as long as it is smaller than theirs."""
    room = make_room(1_000_000)
    feed(room, "small", 200_000)
    for namespace in ("a", "b", "c"):
        feed(room, namespace, 500_000)
    small = room.get("small")
    assert small is not None
    assert small.num_bytes == 200_000
    assert room.num_bytes <= 1_000_000
    assert room.num_dropped == 0


def test_one_that_cannot_be_limited_is_not_lost() -> None:
    """Where there is no memory to let it grow it stays as it was, for this and all later calls."""
    room = make_room(1_000_000)
    stubborn = StubbornPart(MIN_PART_BYTES)
    assert room.use("stubborn", lambda _: stubborn) is stubborn
    stubborn.num_bytes = MIN_PART_BYTES
    room.note("stubborn")
    with pytest.raises(MemoryError):
        room.use("stubborn", Part)
    assert room.namespaces == ("stubborn",)
    feed(room, "other", 900_000)
    assert room.num_bytes == 900_000 + MIN_PART_BYTES


@pytest.mark.parametrize("size", [MIN_PART_BYTES + 512, 60_000, 300_000])
def test_few_of_many_that_are_equal_give_way_to_a_text(size: int) -> None:
    """However many there are, a text makes no more than a few smaller, and is one change."""
    changes: list[None] = []
    room = make_room(500 * size, lambda: changes.append(None))
    for number in range(500):
        feed(room, f"first {number}", size)
    for number in range(200):
        num_changes, num_limits = len(changes), count_limits(room)
        feed(room, f"second {number}", size)
        assert count_limits(room) - num_limits <= 7
        assert len(changes) - num_changes <= 2, "one came, others gave way"
        assert room.num_bytes <= room.max_bytes
        assert room.num_bytes == sum(part.num_bytes for part in room)
    assert (room.num_dropped > 0) == (size < 2 * MIN_PART_BYTES)


def test_who_gave_way_makes_room_for_more_texts_than_one() -> None:
    changes: list[None] = []
    room = make_room(500 * 60_000, lambda: changes.append(None))
    for number in range(500):
        feed(room, f"{number}", 60_000)
    num_changes = len(changes)
    for number in range(100):
        feed(room, f"{number}", 2000)
    assert room.num_bytes <= room.max_bytes
    assert len(changes) - num_changes < 100 / 4


def count_limits(room: Room[Part]) -> int:
    return sum(part.num_limits for part in room)

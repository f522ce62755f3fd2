"""One bound for many namespaces, and who gives way."""

from __future__ import annotations

import pytest

from hdserve.databases.room import MIN_PART_BYTES, Room


class Part:
    """A namespace of which the size is said."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def limit(self, max_bytes: int) -> int:
        self.max_bytes = max_bytes
        self.num_bytes = min(self.num_bytes, max_bytes)
        return 0


class StubbornPart(Part):
    """Cannot be given another bound."""

    def limit(self, max_bytes: int) -> int:
        raise MemoryError


def make_room(max_bytes: int) -> Room[Part]:
    return Room(max_bytes, lambda: None)


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

"""Which is the largest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hdserve.databases.sizes import Sizes

changes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5000) | st.none()), max_size=60)


@given(changes=changes)
def test_the_largest_is_found_up_to_an_eighth(changes: list[tuple[int, int | None]]) -> None:
    sizes, expected = Sizes(), dict[str, int]()
    for number, size in changes:
        if size is None:
            sizes.remove(str(number))
            expected.pop(str(number), None)
        else:
            sizes.set(str(number), size)
            expected[str(number)] = size
        assert sizes.total == sum(expected.values())
    if expected:
        name, next_size = sizes.largest()
        others = sorted(size for other, size in expected.items() if other != name)
        assert expected[name] >= max(expected.values()) * 7 / 8
        assert sizes[name] == expected[name]
        assert next_size in (others or [0])
        assert next_size >= max(others, default=0) * 7 / 8


def test_equal_ones_take_turns() -> None:
    sizes = Sizes()
    for name in "abc":
        sizes.set(name, 800)
    found = []
    for _ in range(4):
        name, _ = sizes.largest()
        found.append(name)
        sizes.set(name, 799)
    assert found == ["a", "b", "c", "a"]

"""How much of a stop string a text ends with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hdserve.engine.tokenization.stop_string import StopString

FEW_LETTERS = st.text(alphabet="ab", min_size=1, max_size=12)


@given(stop=FEW_LETTERS, pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=12))
def test_the_longest_beginning_that_ends_the_text(stop: str, pieces: list[str]) -> None:
    """However the text is cut, and also behind a whole one."""
    found, text = StopString(stop), ""
    assert found.num_open == 0
    for piece in pieces:
        found.push(piece)
        text += piece
        assert found.num_open == max(n for n in range(len(stop)) if text.endswith(stop[:n]))


def test_a_long_text_of_one_letter() -> None:
    """Which ends with as much of it as can be, at each place."""
    found = StopString("a" * 255 + "b")
    for number in range(1, 2000):
        found.push("a")
        assert found.num_open == min(number, 255)
    found.push("b")
    assert found.num_open == 0

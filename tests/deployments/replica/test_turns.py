"""Each name has a turn in an interval, and none that had it long ago is kept."""

from __future__ import annotations

from deployments.replica.turns import Turns


def test_a_name_has_one_turn_in_an_interval() -> None:
    """The first one at once, whatever others had."""
    turns = Turns(10.0)
    taken = [
        turns.take(name, now_s) for name, now_s in zip("aabaab", (0, 1, 2, 9, 10, 11), strict=True)
    ]
    assert taken == [True, False, True, False, True, False]


def test_names_are_forgotten_when_their_interval_is_over() -> None:
    """A replica serves more tenants than it should remember."""
    turns = Turns(10.0)
    for second in range(1000):
        assert turns.take(f"tenant-{second}", float(second))
    assert len(turns._given_s) == 10

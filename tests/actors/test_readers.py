"""The readers of an actor, by a clock of their own."""

from __future__ import annotations

import pytest

from actors.readers import MAX_CATCH_UP_CALLS_PER_S, MAX_POLLS_PER_S, POSITIONS_PER_POLL, Readers


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_who_is_silent_for_a_minute_slows_nobody_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("actors.readers.time", clock)
    readers = Readers(poll_interval_s=0.001)
    readers.note("silent", 4 * POSITIONS_PER_POLL)
    clock.now_s += 60.0
    readers.note("other", 1)
    assert readers.forget_silent() == []
    assert readers.next_poll_s(is_complete=True) == 6 / MAX_POLLS_PER_S
    clock.now_s += 1.0
    assert (readers.forget_silent(), len(readers)) == (["silent"], 1)
    assert readers.next_poll_s(is_complete=True) == 1 / MAX_POLLS_PER_S
    assert readers.next_poll_s(is_complete=False) == 1 / MAX_CATCH_UP_CALLS_PER_S

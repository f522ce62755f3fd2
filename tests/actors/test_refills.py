"""Who is asked for what an actor has lost."""

from __future__ import annotations

from actors.refills import LEASE_S, Refills


def test_who_was_asked_and_gives_nothing_keeps_nobody_waiting() -> None:
    """However often it calls, and is asked again: after a while it is another one's turn."""
    refills = Refills()
    refills.note_lost("n")
    assert refills.ask("n", "a", now_s=0.0)
    assert refills.ask("n", "a", now_s=LEASE_S - 1.0)
    assert not refills.ask("n", "b", now_s=LEASE_S - 1.0)
    assert refills.ask("n", "b", now_s=LEASE_S)
    assert not refills.ask("n", "a", now_s=LEASE_S)


def test_who_answers_is_given_time() -> None:
    """By what it sends, and nobody else: what others publish says nothing of it."""
    refills = Refills()
    refills.note_lost("n")
    assert refills.ask("n", "a", now_s=0.0)
    refills.extend("n", "a", now_s=LEASE_S - 1.0)
    assert not refills.ask("n", "b", now_s=LEASE_S)
    refills.extend("n", "b", now_s=LEASE_S + 1.0)
    refills.finish("n", "a")
    assert not refills.ask("n", "a", now_s=LEASE_S + 2.0)
    assert refills.ask("n", "b", now_s=LEASE_S + 2.0)

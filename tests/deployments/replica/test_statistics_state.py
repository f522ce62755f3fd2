"""Which configurations a choice of a statistics database is for."""

from __future__ import annotations

from actors.statistics_database import StatisticsDatabaseActor
from deployments.replica.statistics_state import choice_key
from hdserve.config import ModelConfig


def key(statistics: str, directory: str = "m", fingerprint: str = "f") -> str:
    return choice_key(ModelConfig(name="m", model=directory, statistics=statistics), fingerprint)


def test_a_choice_comes_back_with_the_configuration_it_was_made_for() -> None:
    """One with another database, or another tokenizer, has none; a later choice replaces it."""
    actor = StatisticsDatabaseActor()
    actor.choose(key("a"), "chosen")
    assert actor.choice(key("b")) is actor.choice(key("a", fingerprint="g")) is None
    for directory in ("chosen", "a"):
        found = actor.choice(key("a", "moved"))
        assert found is not None
        assert found.directory == directory
        actor.choose(key("a"), "a")

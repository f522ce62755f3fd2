"""What requests are drafted from is looked up again only when it may have changed."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.databases.model import ModelDatabase
from hdserve.databases.namespace_tables import NamespaceTables
from hdserve.drafting.base import DraftResources
from hdserve.drafting.sources import DraftSources

NAMESPACES = ("a", "b")
ACTIONS = ("insert", "insert much", "recycle", "recycle much", "clear", "clear all", "other")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(NAMESPACES)), max_size=30))
def test_the_version_tells_of_every_change(actions: list[tuple[str, str]]) -> None:
    """Whoever kept the arrays of a version has those there are, until the version changes."""
    database, other = ModelDatabase(1 << 18), ModelDatabase(1 << 18)
    resources = DraftResources(vocab_size=64, model_database=database, draft_from=(other,))
    sources = DraftSources(resources)
    known, version = {name: sources.of(name) for name in NAMESPACES}, sources.version
    for action, name in actions:
        if action == "insert":
            database.insert(name, range(16))
        elif action == "insert much":
            database.insert(name, [token % 61 for token in range(1500)])
        elif action == "recycle":
            database.recycling(name, 0)
        elif action == "recycle much":
            database.recycling(name, 1000)
        elif action == "other":
            other.insert(name, range(16))
        else:
            database.clear(name if action == "clear" else None)
        if sources.version == version:
            assert all(sources.of(name) is known[name] for name in NAMESPACES)
        known, version = {name: sources.of(name) for name in NAMESPACES}, sources.version


def test_growing_tables_change_the_version() -> None:
    """Their arrays are others then; what fits into those there are changes nothing."""
    database = ModelDatabase(1 << 22)
    database.insert("a", range(6))
    version = database.version
    database.insert("a", range(6))
    assert database.version == version
    database.insert("a", [token * 7919 % 5003 for token in range(5000)])
    assert database.version > version


def test_an_interrupted_text_changes_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays it had replaced by then are not those that were known before."""
    database = ModelDatabase(1 << 22)
    database.insert("a", range(16))
    sources = DraftSources(DraftResources(vocab_size=64, model_database=database))
    known, version = sources.of("a"), sources.version

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(NamespaceTables, "_append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            database.insert("a", [token * 7919 % 5003 for token in range(5000)])
    assert sources.version > version
    assert sources.of("a") is not known


@pytest.mark.parametrize("num_looked_up", [0, 1, 2])
def test_an_interrupted_look_is_made_again(
    monkeypatch: pytest.MonkeyPatch, num_looked_up: int
) -> None:
    """Arrays that were replaced are not taken for those there are because somebody began to see."""
    database = ModelDatabase(1 << 22)
    for name in NAMESPACES:
        database.insert(name, range(16))
    sources = DraftSources(DraftResources(vocab_size=64, model_database=database))
    known = {name: sources.of(name) for name in NAMESPACES}
    for name in NAMESPACES:
        database.insert(name, [token * 7919 % 5003 for token in range(5000)])
    look_up, calls = database.partition, count()

    def interrupt(namespace: str) -> NamespaceTables | None:
        if next(calls) == num_looked_up:
            raise KeyboardInterrupt
        return look_up(namespace)

    with monkeypatch.context() as patched:
        patched.setattr(database, "partition", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _ = [sources.of(name) for name in NAMESPACES]
    assert all(sources.of(name) is not known[name] for name in NAMESPACES)

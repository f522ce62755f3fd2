"""What requests are drafted from is looked up again only when it may have changed."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.bench.replay import verify_recorded
from hdserve.databases.model import MAX_COUNTED_TOKENS, ModelDatabase
from hdserve.databases.namespace_tables import NamespaceTables
from hdserve.drafting.arrays import Databases
from hdserve.drafting.base import DraftResources, Verified
from hdserve.drafting.handles import HandleTable
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.drafting.observing import DecidedStep
from hdserve.drafting.sources import DraftSources
from tests.drafting.helpers import VOCAB_SIZE, make_sequence, propose

NAMESPACES = ("a", "b")
ACTIONS = (
    *("insert", "insert much", "record long", "catch up", "look"),
    *("recycle", "recycle much", "clear", "clear all", "other"),
)
LONG_OUTPUT = [token * 7919 % 50_021 for token in range(5 * MAX_COUNTED_TOKENS)]


def record(database: ModelDatabase, namespace: str, output: list[int]) -> None:
    seq = make_sequence([7], namespace=namespace)
    seq.token_ids += output
    database.record(seq)


def are_present(handles: HandleTable, database: ModelDatabase, namespace: str) -> bool:
    """Whether a table of :class:`Databases` has the present arrays of a namespace."""
    partition = database.peek(namespace)
    if partition is None:
        return True
    arrays = Databases(*handles._arrays)
    held = arrays.model, arrays.model_size, arrays.model_log, arrays.model_places
    return all(one is other for one, other in zip(held, partition.arrays[:4], strict=True))


def change(database: ModelDatabase, action: str, name: str) -> None:
    """Do one of the ``ACTIONS`` that databases know."""
    if action == "insert":
        database.insert(name, range(16))
    elif action == "insert much":
        database.insert(name, [token % 61 for token in range(1500)])
    elif action == "record long":
        record(database, name, LONG_OUTPUT)
    elif action == "look":
        assert database.num_tokens >= 0
    elif action == "recycle":
        database.recycling(name, 0)
    elif action == "recycle much":
        database.recycling(name, 1000)
    else:
        database.clear(name if action == "clear" else None)


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(NAMESPACES)), max_size=30),
    max_bytes=st.sampled_from([1 << 18, 1 << 24]),
)
def test_the_version_tells_of_every_change(actions: list[tuple[str, str]], max_bytes: int) -> None:
    """Whoever kept the arrays of a version has those there are, until the version changes."""
    database, other = ModelDatabase(max_bytes), ModelDatabase(max_bytes)
    resources = DraftResources(vocab_size=64, model_database=database, draft_from=(other,))
    sources = DraftSources(resources)
    known, version = {name: sources.of(name) for name in NAMESPACES}, sources.version
    for action, name in actions:
        if action == "catch up":
            sources.catch_up()
        elif action == "other":
            other.insert(name, range(16))
        else:
            change(database, action, name)
        if sources.version == version:
            assert all(sources.of(name) is known[name] for name in NAMESPACES)
        known = {name: sources.of(name, known[name]) for name in NAMESPACES}
        version = sources.version
        assert all(are_present(known[name].handles, database, name) for name in NAMESPACES)


def test_compiled_code_is_given_the_present_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every request, while a long output is inserted part by part: rows that were replaced end
    before the buckets there are now.  No more than a part or two come with each step."""
    database = ModelDatabase(1 << 24)
    drafter = Hierarchy(DraftResources(vocab_size=VOCAB_SIZE, model_database=database))
    running = [make_sequence([1, 2, 3], namespace=name) for name in NAMESPACES]
    for number, seq in enumerate(running):
        seq.request_id = str(number)
        drafter.start(seq)
    learn = DecidedStep.learn

    def checked(self: DecidedStep, *arguments: Any) -> list[int]:
        requests = [(seq.namespace, seq.drafter_state[drafter.name]) for seq in running]
        assert all(are_present(request.handles, database, name) for name, request in requests)
        return learn(self, *arguments)

    monkeypatch.setattr(DecidedStep, "learn", checked)
    for name in NAMESPACES:
        record(database, name, np.random.default_rng(0).integers(0, 500, 6 * 4096).tolist())
    for step in range(14):
        num_tokens = sum(partition.num_tokens for partition in database._texts)
        verified = []
        for seq in running:
            tree = propose(drafter, seq)
            acceptance = verify_recorded(tree, [step])
            seq.token_ids += acceptance.token_ids
            verified.append(Verified(seq, tree, acceptance, None))
        drafter.observe_all(verified)
        num_new = sum(partition.num_tokens for partition in database._texts) - num_tokens
        assert num_new <= 2 * MAX_COUNTED_TOKENS + len(running)
    assert num_tokens > 12 * 4096


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


@pytest.mark.parametrize("num_looked_up", [0, 1])
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
    look_up, calls = database.peek, count()

    def interrupt(namespace: str) -> NamespaceTables | None:
        if next(calls) == num_looked_up:
            raise KeyboardInterrupt
        return look_up(namespace)

    with monkeypatch.context() as patched:
        patched.setattr(database, "peek", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _ = [sources.of(name) for name in NAMESPACES]
    assert all(sources.of(name) is not known[name] for name in NAMESPACES)

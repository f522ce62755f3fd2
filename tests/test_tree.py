"""A draft tree keeps its invariants whatever is added to it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hdserve.core import Source
from hdserve.tree import Acceptance, DraftTree

TOKENS = st.integers(0, 3)
SOURCES = st.sampled_from(list(Source))
SCORES = st.floats(0, 1)


def check(tree: DraftTree) -> None:
    """Every invariant of the class, by a second way of looking."""
    columns: list[list[Any]] = [
        tree.token_ids,
        tree.parents,
        tree.depths,
        tree.sources,
        tree.scores,
    ]
    assert {len(column) for column in columns} == {len(tree)}
    assert tree.num_draft_tokens == len(tree) - 1 <= tree.capacity
    assert tree.is_full == (tree.num_draft_tokens == tree.capacity)
    assert (tree.parents[0], tree.depths[0]) == (-1, 0)
    paths = []
    for node in range(1, len(tree)):
        assert 0 <= tree.parents[node] < node
        path = tree.path_to(node)
        assert path[0] == 0
        assert path[-1] == node
        assert all(tree.parents[b] == a for a, b in pairwise(path))
        assert tree.depths[node] == len(path) - 1 <= tree.max_depth
        paths.append(tuple(tree.token_ids[step] for step in path[1:]))
    assert len(set(paths)) == len(paths), "equal siblings"
    for node in range(len(tree)):
        children = {
            token: child
            for child, token in enumerate(tree.token_ids)
            if tree.parents[child] == node
        }
        for token in range(-1, 5):
            assert tree.child(node, token) == children.get(token)


class TreeMachine(RuleBasedStateMachine):
    """Adds to a tree and cuts it in any order; remembers the guesses that are in it."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = DraftTree(0, 0)

    @initialize(capacity=st.integers(0, 12), max_depth=st.none() | st.integers(1, 5), root=TOKENS)
    def start(self, capacity: int, max_depth: int | None, root: int) -> None:
        self.tree = DraftTree(root, capacity, max_depth)

    @rule(data=st.data(), token=TOKENS, source=SOURCES, score=SCORES)
    def add_node(self, data: st.DataObject, token: int, source: Source, score: float) -> None:
        tree = self.tree
        parent = data.draw(st.integers(0, len(tree) - 1))
        known, was_full = tree.child(parent, token), tree.is_full
        node = tree.add_node(parent, token, source, score)
        if known is not None:
            assert node == known
        elif was_full or tree.depths[parent] == tree.max_depth:
            assert node is None
        else:
            assert node == len(tree) - 1
            assert (tree.sources[node], tree.scores[node]) == (source, score)

    @rule(path=st.lists(TOKENS, max_size=6), source=SOURCES)
    def add_path(self, path: list[int], source: Source) -> None:
        tree = self.tree
        last = tree.add_path(path, source)
        added = [tree.token_ids[node] for node in tree.path_to(last)][1:]
        assert added == path[: len(added)]
        if len(added) < len(path):
            assert tree.is_full or len(added) == tree.max_depth

    @precondition(lambda self: self.tree.num_draft_tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        tree = self.tree
        kept = data.draw(st.integers(0, tree.num_draft_tokens))
        before = (list(tree.token_ids), list(tree.parents))
        tree.truncate(kept)
        assert (tree.token_ids, tree.parents) == tuple(column[: kept + 1] for column in before)

    @invariant()
    def is_valid(self) -> None:
        check(self.tree)


TestTreeInvariants = TreeMachine.TestCase
TestTreeInvariants.settings = settings(max_examples=30, stateful_step_count=20)


@given(st.lists(st.lists(TOKENS, max_size=5), max_size=6))
def test_paths_are_all_there(paths: list[list[int]]) -> None:
    """A tree with room holds exactly the added guesses and their beginnings."""
    tree = DraftTree(9, 100)
    for path in paths:
        tree.add_path(path, Source.CONTEXT)
    wanted = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    found = {
        tuple(tree.token_ids[step] for step in tree.path_to(node)[1:])
        for node in range(1, len(tree))
    }
    assert found == wanted


def test_the_drawing() -> None:
    """The example of the documentation is what the code makes."""
    tree = DraftTree(7, 8)
    tree.add_path([1, 2], Source.CONTEXT)
    tree.add_path([3], Source.MODEL)
    assert tree.token_ids == [7, 1, 2, 3]
    assert tree.parents == [-1, 0, 1, 0]
    assert tree.depths == [0, 1, 2, 1]


@pytest.mark.parametrize("parent", [-1, 1, 5])
def test_parents_must_exist(parent: int) -> None:
    """A drafter that names a node that is not there gets an error, not a broken tree."""
    tree = DraftTree(7, 8)
    with pytest.raises(IndexError):
        tree.add_node(parent, 7, Source.OTHER)
    check(tree)
    assert len(tree) == 1


def test_no_capacity_is_plain_decoding() -> None:
    """A tree without room stays its root."""
    tree = DraftTree(7, 0)
    assert tree.is_full
    assert tree.add_path([1, 2], Source.OTHER) == 0
    assert len(tree) == 1


def test_acceptance_counts_drafts_only() -> None:
    """The bonus token is not an accepted draft."""
    assert Acceptance([0], [5]).num_accepted_tokens == 0
    assert Acceptance([0, 2, 5], [5, 6, 7]).num_accepted_tokens == 2

"""Trees of several drafters become one: the best of all, parents first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.core import Source
from hdserve.drafting.batch_cost import ForwardCost
from hdserve.drafting.merging import UNCORRECTED, merge_trees
from hdserve.tree import Acceptance, DraftTree
from tests.drafting.budgets import make_budget, trim

SCORES = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
NODES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from(list(Source)), SCORES),
    max_size=8,
)
CORRECTIONS = st.lists(st.sampled_from([0.5, 1.0, 1.5]), min_size=len(Source), max_size=len(Source))


def _tree(nodes: list[tuple[int, int, Source, float]], capacity: int = 10) -> DraftTree:
    tree = DraftTree(9, capacity, 4)
    for parent, token_id, source, score in nodes:
        tree.add_node(min(parent, len(tree) - 1), token_id, source, score)
    return tree


def _paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """What each node but the root guesses."""
    return [
        tuple(tree.token_ids[step] for step in tree.path_to(node)[1:])
        for node in range(1, len(tree))
    ]


@settings(max_examples=200)
@given(st.lists(NODES, max_size=3), st.integers(0, 12), CORRECTIONS)
def test_the_best_of_all_trees_is_kept(
    all_nodes: list[list[tuple[int, int, Source, float]]],
    capacity: int,
    corrections: list[float],
) -> None:
    """By another way of looking: the worth of a path is the lowest of the best worths of its
    beginnings, and no path that was left out is worth more than one that was not."""
    trees = [_tree(nodes) for nodes in all_nodes]
    merged = DraftTree(9, capacity, 4)
    merge_trees(trees, merged, corrections)
    said: dict[tuple[int, ...], list[tuple[float, Source, float]]] = {}
    for tree in trees:
        for path, source, score in zip(
            _paths(tree), tree.sources[1:], tree.scores[1:], strict=True
        ):
            said.setdefault(path, []).append((score * corrections[source], source, score))

    def worth(path: tuple[int, ...]) -> float:
        return min(max(said[path[:end]])[0] for end in range(1, len(path) + 1))

    kept = _paths(merged)
    assert len(set(kept)) == len(kept) == min(capacity, len(said))
    assert all(path[:-1] in ((), *kept[:number]) for number, path in enumerate(kept))
    worths = [worth(path) for path in kept]
    assert worths == sorted(worths, reverse=True)
    assert all(worth(path) <= worths[-1] for path in said if kept and path not in kept)
    for path, source, score in zip(kept, merged.sources[1:], merged.scores[1:], strict=True):
        best = max(said[path], key=lambda guess: guess[0])
        assert (source, score) == best[1:], "the first of the best"


def test_equal_guesses_are_one_and_the_first_goes_first() -> None:
    first, second = DraftTree(9, 4), DraftTree(9, 4)
    first.add_path([1, 2], Source.CONTEXT, 0.5)
    second.add_path([3], Source.OTHER, 0.5)
    second.add_path([1], Source.OTHER, 0.5)
    second.add_path([1, 2, 4], Source.OTHER, 0.6)
    merged = DraftTree(9, 4)
    merge_trees([first, second], merged)
    assert merged.token_ids == [9, 1, 2, 3, 4]
    assert merged.parents == [-1, 0, 1, 0, 2]
    assert merged.scores[1:] == [0.5, 0.6, 0.5, 0.6]
    assert merged.sources[1:] == [Source.CONTEXT, Source.OTHER, Source.OTHER, Source.OTHER]


def test_the_budget_keeps_the_best_of_both_drafters() -> None:
    """Neither a doubtful guess before a good one nor good ones behind many doubtful ones cost it,
    and what a source promises in vain is not believed for long."""
    cost = ForwardCost({1: 1.0, 33: 4.2})

    def kept(name: str, scores: dict[Source, float]) -> dict[Source, int]:
        doubtful, good = DraftTree(9, 12), DraftTree(9, 12)
        doubtful.add_path([5, 6, 7], Source.OTHER, scores[Source.OTHER])
        good.add_path(range(100, 112), Source.CONTEXT, scores[Source.CONTEXT])
        trees = [doubtful, good] if name == "doubtful first" else [good, doubtful]
        merged = DraftTree(9, 12)
        merge_trees(trees, merged, budget.corrections())
        trim(budget, [merged])
        return {source: merged.sources.count(source) for source in scores}

    for name in ("doubtful first", "good first"):
        budget = make_budget(cost)
        found = kept(name, {Source.OTHER: 0.05, Source.CONTEXT: 0.97})
        assert found == {Source.OTHER: 0, Source.CONTEXT: 12}
        wrong = DraftTree(9, 12)
        wrong.add_path([5, 6, 7], Source.OTHER, 1.0)
        for _ in range(300):
            budget.observe(wrong, Acceptance((0,), (1,)))
        found = kept(name, {Source.OTHER: 1.0, Source.CONTEXT: 0.5})
        assert found[Source.OTHER] == 0
        assert found[Source.CONTEXT] > 0


def test_nothing_is_made_of_nothing() -> None:
    merged = DraftTree(9, 4)
    merge_trees([], merged, UNCORRECTED)
    merge_trees([DraftTree(9, 4), DraftTree(9, 4)], merged)
    assert len(merged) == 1

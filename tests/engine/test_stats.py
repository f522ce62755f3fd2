"""Counters of drafts add up however they are summed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hdserve.core import DraftCounts, Source
from hdserve.engine.stats import add_counts, count_draft
from hdserve.tree import Acceptance, DraftTree

SOURCES = st.sampled_from([Source.CONTEXT, Source.MODEL, Source.STATISTICS])
VERDICTS = st.lists(st.tuples(st.lists(SOURCES, max_size=4), st.integers(0, 4)), max_size=8)


def verdict(sources: list[Source], num_accepted: int) -> tuple[DraftTree, Acceptance]:
    """A path of one node per source, of which the first ones were right."""
    tree, node = DraftTree(0, 10), 0
    for token_id, source in enumerate(sources):
        node = tree.add_node(node, token_id, source) or 0
    path = list(range(min(num_accepted, len(sources)) + 1))
    return tree, Acceptance(path, [0] * len(path))


@given(VERDICTS)
def test_counts_are_what_happened(verdicts: list[tuple[list[Source], int]]) -> None:
    """Steps, drafts, tokens and sources are counted once each; plain steps are no drafts."""
    counts = DraftCounts()
    made = [verdict(*item) for item in verdicts]
    for tree, acceptance in made:
        count_draft(tree, acceptance, counts)
    drafted = [(tree, found) for tree, found in made if tree.num_draft_tokens]
    accepted = [tree.sources[node] for tree, acceptance in drafted for node in acceptance.path[1:]]
    proposed = [source for tree, _ in drafted for source in tree.sources[1:]]
    assert counts.num_steps == len(made)
    assert counts.num_drafts == len(drafted) == sum(counts.num_drafts_by_accepted)
    assert counts.num_draft_tokens == len(proposed)
    assert counts.num_accepted_tokens == len(accepted)
    for source in Source:
        assert counts.accepted_by_source.get(source, 0) == accepted.count(source)
        assert counts.draft_tokens_by_source.get(source, 0) == proposed.count(source)
    for number, count in enumerate(counts.num_drafts_by_accepted):
        assert count == sum(found.num_accepted_tokens == number for _, found in drafted)


@given(first=VERDICTS, second=VERDICTS)
def test_sums_equal_counting_everything(
    first: list[tuple[list[Source], int]], second: list[tuple[list[Source], int]]
) -> None:
    """The sum of two counters is the counter of both."""
    counters = [DraftCounts() for _ in range(3)]
    for number, verdicts in enumerate((first, second, [*first, *second])):
        for item in verdicts:
            count_draft(*verdict(*item), counters[number])
    one, other, both = counters
    add_counts(one, other)
    assert one == both

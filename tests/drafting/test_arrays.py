"""The example in the docstring of the arrays of drafting is what happens."""

from __future__ import annotations

import pytest

from hdserve.core import SamplingParams, Sequence, Source
from hdserve.drafting import arrays
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.tree import DraftTree
from tests.drafting.helpers import follow, make_resources, propose

WORDS = ["the", "cat", "sat", ".", "ran", "on"]


def ids(text: str) -> list[int]:
    return [1 + WORDS.index(word) for word in text.split()]


def example(heading: str) -> list[list[str]]:
    """The rows below a heading, in the example."""
    assert arrays.__doc__ is not None
    _, text = arrays.__doc__.split(f"\n    {heading} ")
    table, *_ = text.split("\n\n")
    return [line.split() for line in table.splitlines()[1:] if line.strip()]


def test_the_example() -> None:
    drafter = Hierarchy(make_resources(ids("the cat ran ."), ids("the cat ran on")))
    seq = Sequence("r", ids("the cat sat ."), SamplingParams(temperature=0.0), namespace="default")
    drafter.start(seq)
    for token in ids("the cat"):
        follow(drafter, seq, DraftTree(seq.token_ids[-1], 0), [token])
    propose(drafter, seq, capacity=1)
    scratch = drafter._scratch
    for hit, (number, level, total, *_) in enumerate(example("hits")):
        found = scratch.hits[hit]
        assert int(number) == found[arrays.HIT_INPUT]
        assert found[arrays.HIT_LEVEL] == getattr(arrays, level)
        assert found[arrays.HIT_TOTAL] == int(total)
    for row, (number, word, level, *inputs, evidence) in enumerate(example("candidates")):
        found = scratch.candidates[row]
        assert int(number) == row
        assert [found[arrays.CANDIDATE_TOKEN]] == ids(word)
        assert found[arrays.CANDIDATE_LEVEL] == getattr(arrays, level)
        assert scratch.inputs[row, :6] == pytest.approx([*map(float, inputs[:6])], abs=0.006)
        assert scratch.evidence[row] == pytest.approx(float(evidence), abs=0.006)
    tree = propose(drafter, seq, capacity=4)
    for node, (number, word, parent, depth, *label, score) in enumerate(example("nodes")):
        assert int(number) == node
        assert [tree.token_ids[node], tree.parents[node]] == [*ids(word), int(parent)]
        assert tree.depths[node] == int(depth)
        assert tree.sources[node] is (Source[label[0]] if label else Source.PLAIN)
        assert tree.scores[node] == pytest.approx(float(score), abs=0.006)
    assert node == tree.num_draft_tokens

"""Budgets and trees with given scores, for the tests."""

from __future__ import annotations

from collections.abc import Sequence

from hdserve.core import Source
from hdserve.drafting.batch_cost import BatchCost, ForwardCost
from hdserve.drafting.budget import DraftBudget, StepBudget
from hdserve.tree import DraftTree

FREE = ForwardCost({1: 1.0, 100: 1.0})
"""Rows that cost nothing: memory-bound decoding."""


def make_budget(cost: ForwardCost) -> DraftBudget:
    """A budget for rows that cost the same whomever they belong to."""
    return DraftBudget(BatchCost({1: cost}))


def make_tree(scores: list[float], source: Source = Source.OTHER, capacity: int = 40) -> DraftTree:
    """A tree of a node per score, below the root or each other in no particular way."""
    tree = DraftTree(0, capacity)
    for index, score in enumerate(scores):
        parent = index // 2 if index % 3 else 0
        tree.add_node(min(parent, len(tree) - 1), index, source, score)
    return tree


def next_look(
    budget: DraftBudget, num_sequences: int, num_other_rows: int = 0, num_columns: int = 0
) -> StepBudget:
    """Begin steps until one looks for drafts; of the others nothing is learned."""
    while not (step := budget.begin_step(num_sequences, num_other_rows, num_columns)).is_look:
        pass
    return step


def trim(
    budget: DraftBudget, trees: Sequence[DraftTree], num_other_rows: int = 0, num_columns: int = 0
) -> StepBudget:
    """Begin a step that looks for drafts, in which these trees are found."""
    step = budget.begin_step(len(trees), num_other_rows, num_columns)
    assert step.is_look
    step.trim(trees)
    return step

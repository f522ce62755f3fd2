"""Sequences and steps for the tests of drafters."""

from __future__ import annotations

from hdserve.bench.replay import verify_recorded
from hdserve.core import SamplingParams, Sequence, SpeculationParams
from hdserve.databases.model import ModelDatabase
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.drafting.base import Drafter, DraftResources
from hdserve.tree import Acceptance, DraftTree

VOCAB_SIZE = 500


def make_sequence(
    prompt: list[int], *, namespace: str = "default", **speculation: object
) -> Sequence:
    return Sequence(
        "r",
        list(prompt),
        SamplingParams(),
        SpeculationParams(**speculation),  # type: ignore[arg-type]
        namespace=namespace,
    )


def make_statistics(texts: list[list[int]]) -> StatisticsDatabase:
    builder = StatisticsBuilder("t", VOCAB_SIZE, max_bytes=1 << 20)
    for text in texts:
        builder.add("corpus", text)
    return builder.finish()


def make_resources(
    *outputs: list[int], statistics: list[list[int]] | None = None
) -> DraftResources:
    database = ModelDatabase(1 << 22)
    database.apply("default", outputs)
    corpus = make_statistics(statistics) if statistics else None
    return DraftResources(VOCAB_SIZE, database, corpus)


def propose(drafter: Drafter, seq: Sequence, capacity: int = 16, max_depth: int = 24) -> DraftTree:
    tree = DraftTree(seq.token_ids[-1], capacity, max_depth)
    drafter.propose(seq, tree)
    return tree


def generate(
    drafter: Drafter, seq: Sequence, output: list[int], capacity: int = 16
) -> list[DraftTree]:
    """Let a model that says ``output`` answer; returns the tree of every step."""
    drafter.start(seq)
    trees = []
    while seq.num_output_tokens < len(output):
        tree = propose(drafter, seq, capacity)
        trees.append(tree)
        follow(drafter, seq, tree, output[seq.num_output_tokens :])
    drafter.finish(seq)
    return trees


def follow(drafter: Drafter, seq: Sequence, tree: DraftTree, remaining: list[int]) -> Acceptance:
    """Verify ``tree`` against what comes and tell the drafter."""
    acceptance = verify_recorded(tree, remaining)
    seq.token_ids += acceptance.token_ids
    drafter.observe(seq, tree, acceptance, None)
    return acceptance


def paths(tree: DraftTree) -> list[list[int]]:
    """The token ids from the root's children to every leaf."""
    leaves = set(range(len(tree))) - set(tree.parents)
    return [[tree.token_ids[node] for node in tree.path_to(leaf)[1:]] for leaf in sorted(leaves)]


def check_tree(tree: DraftTree, vocab_size: int = VOCAB_SIZE) -> None:
    """The invariants of a draft tree."""
    assert tree.num_draft_tokens <= tree.capacity
    assert max(tree.depths) <= tree.max_depth
    children = set()
    for node in range(1, len(tree)):
        assert 0 <= tree.parents[node] < node
        assert tree.depths[node] == tree.depths[tree.parents[node]] + 1
        assert 0 <= tree.token_ids[node] < vocab_size
        assert 0.0 < tree.scores[node] <= tree.scores[tree.parents[node]]
        children.add((tree.parents[node], tree.token_ids[node]))
    assert len(children) == tree.num_draft_tokens


def scores_by_path(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """The score of each node by the tokens that lead to it, the root's first."""
    paths = (tuple(tree.token_ids[n] for n in tree.path_to(node)) for node in range(len(tree)))
    return dict(zip(paths, tree.scores, strict=True))

"""Random chunks of several sequences, and what their rows see by definition."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from hdserve.core import Source
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.kv_cache.segments import Segment
from hdserve.tree import DraftTree


@dataclass(frozen=True)
class Node:
    """One row as it should be: its token, its position, and the columns it sees."""

    token_id: int
    position: int
    column: int
    seen: frozenset[int]


def brute_force(chunk: Chunk) -> list[Node]:
    """The rows of a chunk from the definition: a row sees the cached columns, its ancestors and
    itself."""
    cached = frozenset(range(chunk.first_column))
    nodes: list[Node] = []
    for index, token_id in enumerate(chunk.token_ids):
        column = chunk.first_column + index
        seen = cached | set(range(chunk.first_column, column + 1))
        nodes.append(Node(token_id, column, column, frozenset(seen)))
    if chunk.tree is None:
        return nodes
    root = nodes[-1]
    for index in range(1, len(chunk.tree)):
        ancestors = [root.column + node for node in chunk.tree.path_to(index)]
        seen = root.seen | set(ancestors)
        depth = len(ancestors) - 1
        nodes.append(
            Node(
                chunk.tree.token_ids[index],
                root.position + depth,
                root.column + index,
                frozenset(seen),
            )
        )
    return nodes


@st.composite
def chunk_lists(draw: st.DrawFn) -> list[Chunk]:
    """Chunks of several sequences, each in a segment of its own."""
    chunks = []
    start = 0
    for _ in range(draw(st.integers(1, 4))):
        num_cached = draw(st.integers(0, 40))
        token_ids = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
        tree: DraftTree | None = None
        if draw(st.booleans()):
            tree = DraftTree(token_ids[-1], draw(st.integers(0, 12)))
            for _ in range(draw(st.integers(0, 12))):
                parent = draw(st.integers(0, len(tree) - 1))
                tree.add_node(parent, draw(st.integers(1, 60)), Source.OTHER)
        num_scored = draw(st.integers(0, len(token_ids) - (tree is not None)))
        chunks.append(Chunk(Segment(start, 96), num_cached, token_ids, tree, num_scored))
        start += 96
    return chunks

"""The guess and the verdict: :class:`DraftTree` and :class:`Acceptance`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hdserve.core import Source


class DraftTree:
    """Guesses for the next tokens of one sequence, as a tree under a node budget.

    Node 0 is the sequence's last token; a path from it is one guess.  A tree of one node is plain
    decoding::

        node        0       1       2       3
        token_ids   the     cat     sat     dog          the ─┬─ cat ── sat
        parents     -1      0       1       0                 └─ dog

    Invariants: ``parents[i] < i``; equal siblings are merged; at most ``capacity`` nodes besides
    the root and none deeper than ``max_depth``.

    Attributes:
        min_score: nodes less likely than this will be cut, so they need not be proposed.
        token_ids, parents, depths, sources, scores: one entry per node.  A score is the estimated
            probability that the node is accepted (1 for the root and for sources that do not
            estimate), so the sum over the nodes but the root is the expected number of accepted
            tokens.
    """

    __slots__ = (
        "capacity",
        "depths",
        "max_depth",
        "min_score",
        "parents",
        "scores",
        "sources",
        "token_ids",
    )

    def __init__(
        self,
        root_token_id: int,
        capacity: int,
        max_depth: int | None = None,
        min_score: float = 0.0,
    ) -> None:
        self.capacity = capacity
        self.max_depth = capacity if max_depth is None else max_depth
        self.min_score = min_score
        self.token_ids = [root_token_id]
        self.parents = [-1]
        self.depths = [0]
        self.sources = [Source.PLAIN]
        self.scores = [1.0]

    def copy(self) -> DraftTree:
        """A tree with the same nodes, root and size."""
        copied = DraftTree(self.token_ids[0], self.capacity, self.max_depth, self.min_score)
        if len(self.token_ids) > 1:
            copied.add_behind(
                self.token_ids[1:],
                self.parents[1:],
                self.sources[1:],
                self.scores[1:],
                self.depths[1:],
            )
        return copied

    def begins_with(self, other: DraftTree) -> bool:
        """Whether its first nodes are those of ``other``, the root included."""
        end = len(other.token_ids)
        token_ids, parents = [*self.token_ids[:end]], [*self.parents[:end]]
        return token_ids == other.token_ids and parents == other.parents

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.token_ids)

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafted nodes, the root not counted."""
        return len(self.token_ids) - 1

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) > self.capacity

    def child(self, node: int, token_id: int) -> int | None:
        """The child of ``node`` that holds ``token_id``, if the tree has one."""
        token_ids, parents = self.token_ids, self.parents
        for index in range(node + 1, len(token_ids)):
            if parents[index] == node and token_ids[index] == token_id:
                return index
        return None

    def add_node(
        self, parent: int, token_id: int, source: Source, score: float = 1.0
    ) -> int | None:
        """Add a child, or find an equal one.

        Returns:
            The node, or ``None`` if the tree is full or ``parent`` is at the greatest depth.

        Raises:
            IndexError: there is no node ``parent``.
        """
        if not 0 <= parent < len(self.token_ids):
            raise IndexError(f"the tree has no node {parent}")
        found = self.child(parent, token_id)
        if found is not None:
            return found
        depth = self.depths[parent] + 1
        if self.is_full or depth > self.max_depth:
            return None
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(depth)
        self.sources.append(source)
        self.scores.append(score)
        return len(self.token_ids) - 1

    def add_path(self, token_ids: Iterable[int], source: Source, score: float = 1.0) -> int:
        """Add a chain from the root, merged with existing nodes; stops when the tree is full.

        Returns:
            The last node of the path that is in the tree.
        """
        node = 0
        for token_id in token_ids:
            child = self.add_node(node, token_id, source, score)
            if child is None:
                break
            node = child
        return node

    def add_behind(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        sources: Sequence[Source],
        scores: Sequence[float],
        depths: Sequence[int],
    ) -> None:
        """Add many new nodes at once, in order; they must fit and equal no existing sibling;
        ``parents`` are node numbers of the resulting tree."""
        self.token_ids += token_ids
        self.parents += parents
        self.sources += sources
        self.scores += scores
        self.depths += depths

    def truncate(self, num_draft_tokens: int) -> None:
        """Keep the first ``num_draft_tokens`` drafted nodes, in the order they were added."""
        size = num_draft_tokens + 1
        for column in (self.token_ids, self.parents, self.depths, self.sources, self.scores):
            del column[size:]

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root to ``node``, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return path[::-1]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The verifier's verdict on one tree.

    Attributes:
        path: accepted nodes, the root first.
        token_ids: what the model chose at each node of ``path``; all but the last equal the next
            node's token, the last one is the bonus token.
    """

    path: Sequence[int]
    token_ids: Sequence[int]

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were right; the bonus token is not counted."""
        return len(self.path) - 1

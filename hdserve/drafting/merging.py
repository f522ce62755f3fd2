"""One tree from the trees of several drafters: the likeliest nodes of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hdserve.core import Source
from hdserve.tree import DraftTree

UNCORRECTED = (1.0,) * len(Source)
"""No corrections: scores of any source are taken as they are."""

_Path = tuple[int, ...]


def merge_trees(
    trees: Iterable[DraftTree], merged: DraftTree, corrections: Sequence[float] = UNCORRECTED
) -> None:
    """Add the most valuable nodes of ``trees`` to ``merged``, whose nodes they all contain, up to
    its capacity.

    A node's worth is its score times the correction of its source, but no more than its parent's,
    which comes before it; so any beginning of ``merged`` is its best part.  If several trees have
    the same path it gets the score with the highest worth, and its source.  Among equal worths, the
    one whose tree comes first goes first.
    """
    worths: dict[_Path, float] = {}
    guesses: dict[_Path, tuple[Source, float]] = {}
    for tree in trees:
        paths: list[_Path] = [()]
        nodes = zip(tree.parents, tree.token_ids, tree.sources, tree.scores, strict=True)
        for parent, token_id, source, score in list(nodes)[1:]:
            path = (*paths[parent], token_id)
            paths.append(path)
            worth = score * corrections[source]
            if path not in worths or worth > worths[path]:
                worths[path], guesses[path] = worth, (source, score)
    for path, worth in worths.items():  # parents come before their children
        worths[path] = min(worth, worths.get(path[:-1], worth))
    best = sorted(worths, key=worths.__getitem__, reverse=True)[: merged.capacity]
    places: dict[_Path, int | None] = {(): 0}
    for path in best:
        place = places[path[:-1]]
        places[path] = None if place is None else merged.add_node(place, path[-1], *guesses[path])

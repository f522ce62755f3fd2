"""The sums from which the worth of sources follows, as compiled code keeps them.

They are ``float64[2, num_sources]``: the tokens that a source expected to be accepted, and those
that were.  Each starts at :data:`PRIOR_WEIGHT`, which is not part of them.
"""

from __future__ import annotations

from hdserve.databases.compiled import fast_inlined, jit
from hdserve.drafting.handles import float64_1d, float64_2d, int64_1d, uint8_1d
from hdserve.drafting.step_cost import FloatArray

PRIOR_WEIGHT = 20.0
"""Every source starts as if it had drafted this many tokens exactly as well as its scores said."""

MEMORY = 0.998
"""The share of what is known of a source that remains after each further draft."""

NUM_SUMS = 2

_EXPECTED, _ACCEPTED = range(NUM_SUMS)


@fast_inlined
def fade_sources(faded: int, corrections_at: int, sums_at: int, num_sources: int) -> None:
    """Trust what is known of some sources less.

    Args:
        faded: these sources, as a bit mask.
    """
    sums = float64_2d(sums_at, (NUM_SUMS, num_sources))
    _fade(faded, sums)
    _correct(float64_1d(corrections_at, (num_sources,)), sums)


@fast_inlined
def _fade(faded: int, sums: FloatArray) -> None:
    for source in range(sums.shape[1]):
        if faded >> source & 1:
            sums[_EXPECTED, source] *= MEMORY
            sums[_ACCEPTED, source] *= MEMORY


@fast_inlined
def _correct(corrections: FloatArray, sums: FloatArray) -> None:
    for source in range(len(corrections)):
        accepted, expected = sums[_ACCEPTED, source], sums[_EXPECTED, source]
        corrections[source] = (PRIOR_WEIGHT + accepted) / (PRIOR_WEIGHT + expected)


@jit
def observe_tree(
    corrections_at: int,
    sums_at: int,
    num_sources: int,
    scores_at: int,
    sources_at: int,
    num_nodes: int,
    path_at: int,
    num_path_nodes: int,
) -> None:
    """Learn from a tree, whose root does not count.

    Args:
        scores_at, sources_at: addresses of the scores of all nodes, float64, and of their sources,
            uint8.
        path_at: address of the accepted nodes, the root first, int64.
    """
    sums = float64_2d(sums_at, (NUM_SUMS, num_sources))
    scores = float64_1d(scores_at, (num_nodes,))
    sources = uint8_1d(sources_at, (num_nodes,))
    path = int64_1d(path_at, (num_path_nodes,))
    drafted = 0
    for node in range(1, num_nodes):
        drafted |= 1 << sources[node]
    _fade(drafted, sums)
    for node in range(1, num_nodes):
        sums[_EXPECTED, sources[node]] += scores[node]
    for index in range(1, num_path_nodes):
        sums[_ACCEPTED, sources[path[index]]] += 1.0
    _correct(float64_1d(corrections_at, (num_sources,)), sums)

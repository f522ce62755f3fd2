"""Small chunks of earlier runs are joined, so that restarts do not make ever more files.

    before        A | B | C             C is of the newest run that has chunks, and stays as it is
    first sync    A | B | J = A + B | C
    next sync     J | C

A joined chunk ends where its last part ended.  It is on the disk before a part is deleted, and
whichever parts a crash leaves beside it, it takes their place when it is restored.  A reader that
had read up to the end of A, or into it, gets all of J, and drops what it has by its name.

As the numbers of two runs lie far apart, those of J from before B were never given to any output.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from hdserve.databases.generation_file import VERSIONS_PER_GENERATION
from hdserve.databases.segment import Segment, concatenate

Chunk = tuple[int, Segment]
"""First version and outputs."""


@dataclass(frozen=True, slots=True)
class ChunkJoin:
    """A chunk that is to take the place of several.

    Attributes:
        version: its first version.
        parts: first versions of the chunks it is made of.
        inner_ends: where each of them but the last ended.
    """

    version: int
    segment: Segment
    parts: tuple[int, ...]
    inner_ends: frozenset[int]


def find_joins(chunks: Sequence[Chunk], saved: Container[int], max_bytes: int) -> list[ChunkJoin]:
    """What to make of neighbours of runs before the newest, as long as a chunk has room for them.

    Args:
        chunks: of one namespace, oldest first; none between them is missing.
        saved: first versions of those that have a file of their own.
        max_bytes: of one chunk.
    """
    groups: list[list[Chunk]] = [[]]
    num_bytes = 0
    for chunk in chunks:
        version, segment = chunk
        if _last_generation(*chunk) == _last_generation(*chunks[-1]):
            break
        num_bytes += segment.num_bytes
        is_saved = version in saved
        if num_bytes > max_bytes or not is_saved:
            groups.append([])
            num_bytes = segment.num_bytes
        if is_saved:
            groups[-1].append(chunk)
    return [_joined(group) for group in groups if len(group) > 1]


def is_joined(version: int, segment: Segment) -> bool:
    """Whether a chunk holds outputs of several runs."""
    return version // VERSIONS_PER_GENERATION < _last_generation(version, segment)


def _joined(chunks: Sequence[Chunk]) -> ChunkJoin:
    segment = concatenate([part for _, part in chunks])
    ends = [version + len(part) for version, part in chunks]
    parts = tuple(version for version, _ in chunks)
    return ChunkJoin(ends[-1] - len(segment), segment, parts, frozenset(ends[:-1]))


def _last_generation(version: int, segment: Segment) -> int:
    return (version + len(segment) - 1) // VERSIONS_PER_GENERATION

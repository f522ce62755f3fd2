"""Where contiguous rows can be freed by moving what ended sequences left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from hdserve.engine.kv_cache.segments import Segment


@dataclass(frozen=True, slots=True)
class RowRun:
    """Consecutive rows that belong to no running sequence: gaps, and what ended sequences left.

    What ended sequences left can move, so that the gaps between become one::

        running | ended  gap  ended  gap | running
        running | ended  ended  gap      | running

    Attributes:
        pieces: in order, each with whether it is a gap; two gaps never touch.
    """

    pieces: Sequence[tuple[Segment, bool]]

    @property
    def start(self) -> int:
        return self.pieces[0][0].start

    @property
    def end(self) -> int:
        return self.pieces[-1][0].end

    @property
    def num_rows(self) -> int:
        return self.end - self.start

    @property
    def ended(self) -> list[Segment]:
        """What ended sequences left."""
        return [piece for piece, is_gap in self.pieces if not is_gap]

    @property
    def num_ended_rows(self) -> int:
        """How many rows move at most to make its gaps one."""
        return sum(piece.num_rows for piece in self.ended)

    def parts(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        """Every part with ``num_rows`` free rows that contains no smaller such part: how many of
        its rows move at most, its first piece, and the one behind its last."""
        num_in_gaps = [piece.num_rows * is_gap for piece, is_gap in self.pieces]
        first = num_free_rows = 0
        for end, number in enumerate(num_in_gaps, start=1):
            num_free_rows += number
            if num_free_rows < num_rows:
                continue
            while num_free_rows >= num_rows:
                num_free_rows -= num_in_gaps[first]
                first += 1
            begin = first - 1
            num_part_rows = self.pieces[end - 1][0].end - self.pieces[begin][0].start
            yield num_part_rows - num_free_rows - num_in_gaps[begin], begin, end


def find_runs(gaps: Iterable[Segment], ended: Iterable[Segment]) -> list[RowRun]:
    """The longest runs of ``gaps`` and of what ``ended`` sequences left, in order."""
    pieces = [(gap.start, gap, True) for gap in gaps]
    pieces += [(segment.start, segment, False) for segment in ended]
    runs: list[list[tuple[Segment, bool]]] = []
    end = None
    for start, segment, is_gap in sorted(pieces, key=itemgetter(0)):
        if start != end:
            runs.append([])
        runs[-1].append((segment, is_gap))
        end = start + segment.num_rows
    return [*map(RowRun, runs)]


def cheapest_part(runs: Sequence[RowRun], num_rows: int) -> RowRun | None:
    """The part of a run with ``num_rows`` free rows in which the fewest rows have to move."""
    parts = ((part, run) for run in runs for part in run.parts(num_rows))
    found = min(parts, key=lambda each: each[0][0], default=None)
    if found is None:
        return None
    (_, begin, end), run = found
    return RowRun(run.pieces[begin:end])

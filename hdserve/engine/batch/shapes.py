"""How the sizes of a forward are padded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hdserve.engine.kv_cache.segments import align


@dataclass(frozen=True, slots=True)
class Shapes:
    """How the sizes of a forward are padded, and how it attends.

    Kernels round differently for different shapes, so the same row can get a different result if
    there are other rows next to it.  Exact shapes are those that were found not to do this.

    Attributes:
        row_counts: allowed numbers of rows, ascending; above them, or if there are none, any.
        is_exact: attention, too, gives a row the same bits whatever else is in the forward: by the
            compiled kernel, or, if that cannot be used, in float64.  A draft's ancestors are among
            its siblings in the cache, and contiguous once they are accepted, so PyTorch's attention
            adds the same numbers in another order; in float64 the difference vanishes when the
            result is rounded to the model's precision.
        min_rows: fewest rows there may be.
    """

    row_counts: tuple[int, ...] = ()
    is_exact: bool = False
    min_rows: int = 1

    def pads(self, num_rows: int) -> bool:
        """Whether this many rows are padded to an allowed number."""
        return not self.row_counts or num_rows <= self.row_counts[-1]

    def pad_rows(self, num_rows: int) -> int:
        """The smallest allowed number of rows that is at least ``num_rows``."""
        num_rows = max(num_rows, self.min_rows)
        if not self.row_counts:
            return num_rows
        return next((count for count in self.row_counts if count >= num_rows), num_rows)

    def fill_rows(self, most: int) -> int:
        """The largest number of rows, at most ``most``, that is not padded; ``most`` if there is
        none."""
        if not self.pads(most):
            return most
        return max((count for count in self.row_counts if count <= most), default=most)


def exact_candidates(max_rows: int) -> Shapes:
    """Shapes that are likely to be exact, for forwards of up to ``max_rows``.

    Measured on an AVX-512 CPU with PyTorch 2.13: float32 products switch kernels below 16 rows.
    """
    return Shapes(tuple(_row_counts(max_rows)), is_exact=True)


def _row_counts(max_rows: int) -> Iterator[int]:
    count = 16
    while count < max_rows:
        yield count
        count += 16 if count < 96 else 32 if count < 256 else 128
    yield align(count)

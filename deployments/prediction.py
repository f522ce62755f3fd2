"""How much of the text predicted by the client came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hdserve import core

MAX_COMPARED = 2**15
"""The time grows with the product of both lengths: 0.3 s for two times 30,000 tokens, 2.4 s for two
times 100,000."""


class PredictionCounts(NamedTuple):
    """Tokens of the prediction that appeared in the answer, in order, and those that did not, as
    the OpenAI API counts them: by the text, whatever drafted it."""

    num_accepted_tokens: int
    num_rejected_tokens: int


def count_prediction(sequences: Iterable[core.Sequence]) -> PredictionCounts:
    """Count over all choices; each is compared with the whole prediction."""
    num_tokens = num_accepted = 0
    for seq in sequences:
        num_tokens += len(seq.speculation.prediction)
        num_accepted += num_common(seq.output_token_ids, seq.speculation.prediction)
    return PredictionCounts(num_accepted, num_tokens - num_accepted)


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common subsequence; where the sequences differ in more than
    ``MAX_COMPARED`` tokens between what they begin and end with, of the first so many.

    Bit-parallel, one step for each token of ``second`` (Hyyrö, "Bit-parallel LCS-length computation
    revisited", AWOCA 2004): bit ``i`` of the row is 0 where the length grows at token ``i`` of
    ``first``.  Two times 2000 tokens take 2 ms, two times 30,000 take 0.2 s.
    """
    num_same = _num_equal(first, second)
    first, second = first[num_same:], second[num_same:]
    num_last = _num_equal(first[::-1], second[::-1])
    end = len(first) - num_last, len(second) - num_last
    first, second = first[: min(end[0], MAX_COMPARED)], second[: min(end[1], MAX_COMPARED)]
    return num_same + _num_common(first, second) + num_last


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    places: dict[int, int] = {}
    for index, token_id in enumerate(first):
        places[token_id] = places.get(token_id, 0) | 1 << index
    full = (1 << len(first)) - 1
    row = full
    for token_id in second:
        if found := row & places.get(token_id, 0):
            row = ((row + found) | (row - found)) & full
    return len(first) - row.bit_count()

"""How much of the text predicted by the client came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hdserve import core


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
    """Return the length of the longest common subsequence.

    Bit-parallel, one step for each token of ``second`` (Hyyrö, "Bit-parallel LCS-length computation
    revisited", AWOCA 2004): bit ``i`` of the row is 0 where the length grows at token ``i`` of
    ``first``.  Two times 2000 tokens take 2 ms, two times 30,000 take 0.2 s.
    """
    places: dict[int, int] = {}
    for index, token_id in enumerate(first):
        places[token_id] = places.get(token_id, 0) | 1 << index
    full = (1 << len(first)) - 1
    row = full
    for token_id in second:
        if found := row & places.get(token_id, 0):
            row = ((row + found) | (row - found)) & full
    return len(first) - row.bit_count()

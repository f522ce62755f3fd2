"""What steps of about as many sequences have told the draft budget."""

from __future__ import annotations

from hdserve.drafting.batch_cost import BatchCost
from hdserve.drafting.draft_backoff import DraftBackoff
from hdserve.drafting.draft_price import DraftPrice

_NUM_COMPARED_FORWARDS = 32
_MOST_SHARE = 2.0
"""The most that a forward counts for, relative to the expected time: beyond that something else
kept the machine busy."""

_TOO_SLOW = 0.9
"""If forwards take no more than this share of the measured time, the measurement was too high."""


class Experience:
    """What was learned from steps, and the assumed cost of their forwards.

    Something else may have kept the machine busy while forwards were timed when the engine started.
    If they take much less than expected, their cost is scaled, and everything is learned anew.

    Attributes:
        cost: of a forward, by its rows and sequences.
        backoff: when to look for drafts; its times are those of each sequence.
        price: what a draft takes in addition to its row, in seconds.
    """

    __slots__ = ("_forward_share", "_num_forwards", "backoff", "cost", "price")

    def __init__(self, cost: BatchCost, num_sequences: int) -> None:
        self._begin(cost, num_sequences)

    def _begin(self, cost: BatchCost, num_sequences: int) -> None:
        step_s = cost.of(num_sequences).plain_s() / num_sequences
        self.cost = cost
        self.backoff, self.price = DraftBackoff(step_s, num_sequences), DraftPrice()
        self._num_forwards = 0
        self._forward_share = 0.0
        """The mean time of these forwards, relative to the expected time."""

    def note_forward(self, share: float, num_sequences: int) -> None:
        """Learn from another forward, whose time is given relative to the expected one."""
        self._num_forwards = self._num_forwards % _NUM_COMPARED_FORWARDS + 1
        more = min(share, _MOST_SHARE) - self._forward_share
        self._forward_share += more / self._num_forwards
        if self._num_forwards == _NUM_COMPARED_FORWARDS and self._forward_share <= _TOO_SLOW:
            self._begin(self.cost.scaled(self._forward_share), num_sequences)

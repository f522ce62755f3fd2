"""When to look for drafts that did not pay."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_MAX_PAUSE, _MAX_PAUSE_S = 256, 0.5
"""The longest pause, in steps and in seconds of plain decoding, whichever is longer.  With a longer
one drafts would rest for long after other work has kept the machine busy."""

_AFFORDABLE_LOSS = 0.005
_PATIENCE = 0.1
"""How much may be lost before the first pause, as a share of a plain decoding step."""

_WORST_GAIN = -0.5
"""The largest loss that counts, as a share of what the tokens of the step take plainly."""

_NUM_SETTLING_LOOKS, _NUM_SETTLING_STEPS = 2, 8
"""So many steps with drafts, and without, take longer after those of the other kind, which leave
other data in the processor's caches.  Eight sequences of hdserve-mini took 1.65, 1.34, 1.26, 1.15,
1.00, ... and from the ninth step without drafts on 0.76 ms (docs/adr/0030)."""

_NUM_COMPARED_STEPS = _NUM_SETTLING_STEPS + 4
"""Steps without drafts that are taken before a loss of steps with drafts counts."""

_NUM_WEIGHED_STEPS = 32
"""The gain of a look counts for one part in this many of the mean: drafts may pay by a few large
gains among many losses."""

_NUM_TIMED_STEPS = 9


class _StepTimes:
    """What the last steps took beside their forwards, with drafts looked for and without.

    The first steps of a kind take longer than those that follow in a row, so they count only where
    nothing else is known, or where they took less.

    Attributes:
        trying_s: of the last look that may have been at a part of the sequences; ``None`` before.
    """

    def __init__(self) -> None:
        self.looking_s: deque[float] = deque(maxlen=_NUM_TIMED_STEPS)
        self.trying_s: float | None = None
        self.plain_s: deque[float] = deque(maxlen=_NUM_TIMED_STEPS)

    def add_look(self, seconds: float, num_in_a_row: int) -> None:
        """Add the time of a step that looked for drafts."""
        _add(self.looking_s, seconds, is_settling=num_in_a_row <= _NUM_SETTLING_LOOKS)

    def add_plain(self, seconds: float, num_in_a_row: int) -> None:
        """Add the time of a step without drafts."""
        _add(self.plain_s, seconds, is_settling=num_in_a_row <= _NUM_SETTLING_STEPS)


def _add(times: deque[float], seconds: float, *, is_settling: bool) -> None:
    """Add to the last times of a kind.  If one of the first in a row takes less than those before,
    something else kept the machine busy then, or it had not settled, and those are dropped."""
    if is_settling and times:
        if seconds >= _median(times):
            return
        times.clear()
    times.append(seconds)


class Patience:
    """How long to go on looking for drafts that do not pay; all times are for each sequence of a
    step.

    What it was while something else kept the machine busy is soon forgotten: a loss counts only up
    to half of what its tokens take plainly, and what plain steps took only until ``_MAX_PAUSE``
    looks came in a row.  The next look that seems to lose is followed by a few plain steps then, as
    is the first of all, before any loss counts.

    Pauses double while it does not pay, up to as many steps as make what the look at their end
    loses ``_AFFORDABLE_LOSS`` of their time, or to the longest there is.  To that look belongs what
    it takes more than one of many in a row, what the plain steps after it take more than later
    ones, and what drafters catch up with: without it nobody would have told them of the sequences
    since.  A look that gains, which may have been at a part of the sequences, is followed by
    another one.

    Args:
        step_s: a step of plain decoding; a part of it may be lost before the first pause.
        num_sequences: of a step.

    Attributes:
        was_looking: what :meth:`begin_step` said last.
        was_cautious: whether that look may be at a part of the sequences.
        num_steps_since: how many steps without a look came before it.
    """

    def __init__(self, step_s: float, num_sequences: int) -> None:
        self._step_s = step_s
        self._max_pause = max(_MAX_PAUSE, int(_MAX_PAUSE_S / (step_s * num_sequences)))
        self._gain_s = step_s * _PATIENCE
        self._pause = 0
        self._num_steps_to_skip = 0
        self._num_looks = 0
        self._num_steps_in_a_row = 0
        """How many steps in a row were like the last one."""
        self._has_gained = False
        self._has_compared = False
        """Whether a look has seemed to lose since the times of plain steps were forgotten."""
        self.was_looking = True
        self.was_cautious = False
        self.num_steps_since = 0
        self._resuming_s: deque[float] = deque(maxlen=_NUM_TIMED_STEPS)
        """What looks at the end of a pause take more than others, with the plain steps after."""
        self._settling_s = 0.0
        """What the plain steps after the last look took more than others."""
        self._alone, self._beside_prompts = _StepTimes(), _StepTimes()

    def begin_step(self) -> bool:
        """Begin a step, and say whether to look in it."""
        is_looking = self._num_steps_to_skip <= 0
        self._num_steps_to_skip -= 1
        self.num_steps_since = 0 if self.was_looking else self._num_steps_in_a_row
        self._num_steps_in_a_row = self._num_steps_in_a_row * (is_looking == self.was_looking) + 1
        self.was_looking, self.was_cautious = is_looking, self.is_cautious
        if is_looking and self._num_steps_in_a_row % _MAX_PAUSE == 0:
            self._has_compared = False
            for times in (self._alone, self._beside_prompts):
                times.plain_s.clear()
        return is_looking

    def skip_step(self) -> bool:
        """Let a step of the middle of a pause go by, which neither looks nor is timed.

        Returns:
            Whether this is one; else it has to :meth:`begin_step`.
        """
        is_settling = self.was_looking or self._num_steps_in_a_row < _NUM_SETTLING_STEPS
        if is_settling or self._num_steps_to_skip <= _NUM_TIMED_STEPS:
            return False
        self._num_steps_to_skip -= 1
        self._num_steps_in_a_row += 1
        return True

    @property
    def is_timed(self) -> bool:
        """Whether the time of the step that was asked for last will be needed.  The first steps of
        a pause tell what the look before them cost, the last ones how long steps without drafts
        take."""
        is_settling = not self.was_looking and self._num_steps_in_a_row <= _NUM_SETTLING_STEPS
        return is_settling or self._num_steps_to_skip < _NUM_TIMED_STEPS

    @property
    def is_cautious(self) -> bool:
        """Whether it is enough to look for drafts of a part of the sequences: the last look lost,
        so pauses are made between looks."""
        return self._pause > 0 and not self._has_gained

    def took(self, seconds: float, *, catching_up_s: float, beside_prompts: bool) -> None:
        """Learn what the last step took beside its forward and to have drafters catch up."""
        self._num_looks += self.was_looking
        times = self._beside_prompts if beside_prompts else self._alone
        if not self.was_looking:
            if times.plain_s and self._num_steps_in_a_row <= _NUM_SETTLING_STEPS:
                self._settling_s += max(0.0, seconds - _median(times.plain_s))
            times.add_plain(seconds, self._num_steps_in_a_row)
            return
        if self.was_cautious:
            times.trying_s = seconds
        if self._pause:
            more_s = max(0.0, seconds - self.looking_s)
            self._resuming_s.append(catching_up_s + more_s + self._settling_s)
        self._settling_s = 0.0
        if not (self.was_cautious and times.looking_s):
            times.add_look(seconds, self._num_steps_in_a_row)

    @property
    def _times(self) -> _StepTimes:
        """The times of steps of one kind, alone or beside prompts, which count different things."""
        alone, beside_prompts = self._alone, self._beside_prompts
        is_known = alone.looking_s and (alone.plain_s or not beside_prompts.plain_s)
        return alone if is_known or not beside_prompts.looking_s else beside_prompts

    @property
    def looking_s(self) -> float:
        """What a step that looks for drafts takes beside its forward."""
        times = self._times
        looking_s = _median(times.looking_s)
        if self.was_cautious and times.trying_s is not None:
            return min(times.trying_s, looking_s)
        return looking_s

    @property
    def plain_s(self) -> float:
        """What a step that does not look for drafts takes beside its forward: nothing if there was
        none, which is plain decoding at its best, and never more than :meth:`looking_s`."""
        return min(_median(self._times.plain_s), self.looking_s)

    def weigh(self, gain_s: float, as_plain_s: float) -> None:
        """Learn what drafting gained in a step, in seconds, or lost, whose tokens take
        ``as_plain_s`` plainly."""
        if not self.was_looking or self._num_looks < _NUM_TIMED_STEPS:
            return  # the first ones take long, as everything does for the first time
        self._has_gained = gain_s > 0
        if gain_s < 0 and not self._has_compared:
            self._has_compared = True
            self._num_steps_to_skip = _NUM_COMPARED_STEPS
            return
        counted_s = max(gain_s, _WORST_GAIN * as_plain_s)
        self._gain_s += (counted_s - self._gain_s) / _NUM_WEIGHED_STEPS
        if self._gain_s >= 0:
            self._pause = 0
        elif gain_s <= 0:
            loss_s = _median(self._resuming_s) - min(gain_s, self._gain_s)
            loss = loss_s / self._step_s
            longest = min(self._max_pause, int(loss / _AFFORDABLE_LOSS))
            self._pause = max(1, min(2 * self._pause, longest))
        self._num_steps_to_skip = 0 if self._has_gained else self._pause


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0

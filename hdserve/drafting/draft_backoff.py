"""When to look for drafts again that did not pay."""

from __future__ import annotations

from collections import deque

_MAX_PAUSE, _MAX_PAUSE_S = 256, 0.5
"""The longest pause, in steps and in seconds of plain decoding, whichever is longer.  If it were
longer, drafts would rest too long after other work has kept the machine busy."""

_AFFORDABLE_LOSS = 0.005
_INITIAL_GAIN = 0.1
"""How much may be lost before the first pause, as a share of a plain decoding step."""

_WORST_GAIN = -0.5
"""The largest loss that counts, relative to the time of plain decoding of the same tokens."""

_NUM_SETTLING_LOOKS, _NUM_SETTLING_STEPS = 2, 8
"""After a switch, this many steps with drafts, or without, take longer, because the other kind left
other data in the processor's caches.  Eight sequences of hdserve-mini took 1.65, 1.34, 1.26, 1.15,
1.00, ... and from the ninth step without drafts on 0.76 ms (docs/adr/0030)."""

_NUM_COMPARED_STEPS = _NUM_SETTLING_STEPS + 4
"""Steps without drafts that are made before a loss of steps with drafts counts."""

_NUM_WEIGHED_STEPS = 32
"""The gain of a look counts as one part in this many of the mean: drafts may pay by a few large
gains among many losses."""

_NUM_TIMED_STEPS = 9


class _LastTimes:
    """The last times of a kind.

    Attributes:
        is_known: whether there is any.
        median: 0 if there is none.
    """

    __slots__ = ("_times", "is_known", "median")

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_NUM_TIMED_STEPS)
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._times.clear()
        self.is_known, self.median = False, 0.0

    def add(self, seconds: float, *, is_settling: bool = False) -> None:
        """Add another time.  One of the first after a switch is longer than the following ones, so
        it only counts if nothing else is known, or if it is less than the earlier ones: these were
        disturbed by something else, or not settled, and are dropped."""
        if is_settling and self.is_known:
            if seconds >= self.median:
                return
            self._times.clear()
        self._times.append(seconds)
        self.is_known, self.median = True, sorted(self._times)[len(self._times) // 2]


class _StepTimes:
    """What the last steps took besides their forwards.

    Attributes:
        looks, plain: with drafts looked for, and without.
        probing_s: of the last probe, a look that may have been at a part of the sequences; ``None``
            before.
    """

    __slots__ = ("looks", "plain", "probing_s")

    def __init__(self) -> None:
        self.looks, self.plain = _LastTimes(), _LastTimes()
        self.probing_s: float | None = None


class DraftBackoff:
    """How long to go on looking for drafts that do not pay; all times are per sequence of a step.

    Disturbances by other work on the machine are soon forgotten: a loss counts only up to half of
    the plain decoding time of its tokens, and the times of plain steps are dropped after
    ``_MAX_PAUSE`` looks in a row.  Then, as at the very first time, a look that seems to lose is
    followed by a few plain steps, before any loss counts.

    Pauses double while drafting does not pay, until the loss of the look at their end is only
    ``_AFFORDABLE_LOSS`` of their time, or to the longest pause.  That loss includes the extra time
    of such a look compared with one of many in a row, that of the first plain steps after it, and
    the time in which drafters catch up on what they were not told in the pause.  After a look that
    gains, which may have been at a part of the sequences, the next step looks again.

    Args:
        step_s: a step of plain decoding; a part of it may be lost before the first pause.
        num_sequences: of a step.

    Attributes:
        was_drafting: what :meth:`begin_step` returned last.
        was_probing: whether that look may be at a part of the sequences.
        num_steps_since: how many steps without a look came before it.
    """

    def __init__(self, step_s: float, num_sequences: int) -> None:
        self._step_s = step_s
        self._max_pause = max(_MAX_PAUSE, int(_MAX_PAUSE_S / (step_s * num_sequences)))
        self._gain_s = step_s * _INITIAL_GAIN
        self._pause = 0
        self._num_steps_to_skip = 0
        self._num_looks = 0
        self._num_steps_in_a_row = 0
        """How many consecutive steps were of the same kind as the last one."""
        self._has_gained = False
        self._has_compared = False
        """Whether a look has seemed to lose since the times of plain steps were dropped."""
        self.was_drafting = True
        self.was_probing = False
        self.num_steps_since = 0
        self._resuming = _LastTimes()
        """The extra time of looks at the end of a pause, and of the plain steps after them."""
        self._settling_s = 0.0
        """The extra time of the plain steps after the last look."""
        self._alone, self._beside_prompts = _StepTimes(), _StepTimes()

    def begin_step(self) -> bool:
        """Begin a step; returns whether to look for drafts in it."""
        is_drafting = self._num_steps_to_skip <= 0
        self._num_steps_to_skip -= 1
        self.num_steps_since = 0 if self.was_drafting else self._num_steps_in_a_row
        self._num_steps_in_a_row = self._num_steps_in_a_row * (is_drafting == self.was_drafting) + 1
        self.was_drafting, self.was_probing = is_drafting, self.is_probing
        if is_drafting and self._num_steps_in_a_row % _MAX_PAUSE == 0:
            self._has_compared = False
            for times in (self._alone, self._beside_prompts):
                times.plain.clear()
        return is_drafting

    def skip_step(self) -> bool:
        """Skip a step in the middle of a pause, which neither looks nor is timed.

        Returns:
            Whether it was skipped; if not, call :meth:`begin_step`.
        """
        is_settling = self.was_drafting or self._num_steps_in_a_row < _NUM_SETTLING_STEPS
        if is_settling or self._num_steps_to_skip <= _NUM_TIMED_STEPS:
            return False
        self._num_steps_to_skip -= 1
        self._num_steps_in_a_row += 1
        return True

    @property
    def is_timed(self) -> bool:
        """Whether the time of the present step will be needed.  The first steps of a pause tell the
        cost of the look before them, the last ones how long steps without drafts
        take."""
        is_settling = not self.was_drafting and self._num_steps_in_a_row <= _NUM_SETTLING_STEPS
        return is_settling or self._num_steps_to_skip < _NUM_TIMED_STEPS

    @property
    def is_probing(self) -> bool:
        """Whether it is enough to look for drafts of a part of the sequences: the last look lost,
        so there are pauses between looks."""
        return self._pause > 0 and not self._has_gained

    def took(self, seconds: float, *, catching_up_s: float, beside_prompts: bool) -> None:
        """Learn what the last step took besides its forward and drafters' catching up."""
        self._num_looks += self.was_drafting
        times = self._beside_prompts if beside_prompts else self._alone
        if not self.was_drafting:
            is_settling = self._num_steps_in_a_row <= _NUM_SETTLING_STEPS
            if times.plain.is_known and is_settling:
                self._settling_s += max(0.0, seconds - times.plain.median)
            times.plain.add(seconds, is_settling=is_settling)
            return
        if self.was_probing:
            times.probing_s = seconds
        if self._pause:
            looking_s, _ = self.beside_forward_s()
            more_s = max(0.0, seconds - looking_s)
            self._resuming.add(catching_up_s + more_s + self._settling_s)
        self._settling_s = 0.0
        if not (self.was_probing and times.looks.is_known):
            is_settling = self._num_steps_in_a_row <= _NUM_SETTLING_LOOKS
            times.looks.add(seconds, is_settling=is_settling)

    def beside_forward_s(self) -> tuple[float, float]:
        """What a step takes besides its forward if it looks for drafts, and if it does not: the
        latter is 0 if there was none, which assumes the best for plain decoding, and never more
        than the former.  Both are of steps of one kind, without or with prompts; the two are not
        comparable."""
        alone, beside_prompts = self._alone, self._beside_prompts
        is_known = alone.plain.is_known or not beside_prompts.plain.is_known
        is_known = is_known and alone.looks.is_known
        times = alone if is_known or not beside_prompts.looks.is_known else beside_prompts
        looking_s = times.looks.median
        if self.was_probing and times.probing_s is not None:
            looking_s = min(times.probing_s, looking_s)
        return looking_s, min(times.plain.median, looking_s)

    def weigh(self, gain_s: float, as_plain_s: float) -> None:
        """Learn what drafting gained or lost in a step, in seconds; ``as_plain_s`` is the plain
        decoding time of its tokens."""
        if not self.was_drafting or self._num_looks < _NUM_TIMED_STEPS:
            return  # the first steps take long, as everything does the first time
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
            loss_s = self._resuming.median - min(gain_s, self._gain_s)
            loss = loss_s / self._step_s
            longest = min(self._max_pause, int(loss / _AFFORDABLE_LOSS))
            self._pause = max(1, min(2 * self._pause, longest))
        self._num_steps_to_skip = 0 if self._has_gained else self._pause

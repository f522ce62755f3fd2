"""When to look for drafts again that did not pay.

A *look* is a step that looks for drafts, a *plain* step is one that does not, and a *probe* is a
look which may be at a part of the sequences.  The numbers are decisions of docs/adr/0030::

    ┌───────────────────────┐  it seems to lose, and plain steps  ┌──────────────────┐
    │ looks, step by step;  │  were not timed for long (14)       │ 12 plain steps,  │
    │ another one follows   │ ──────────────────────────────────► │ of which the     │
    │ - the first nine (10) │ ◄────────────────────────────────── │ last four count  │
    │ - one that gains (12) │  then the next look                 └──────────────────┘
    │ - any while the mean  │
    │   gain of the last 32 │  else: it loses                     ┌──────────────────┐
    │   is not negative (11)│ ──────────────────────────────────► │ a pause of plain │ ◄─┐ it loses:
    │                       │ ◄────────────────────────────────── │ steps, then a    │ ──┘ a longer
    └───────────────────────┘  it gains (12), or the mean gain    │ probe            │     pause
                               is not negative by now (11)        └──────────────────┘     (12, 15)

    pause   8 steps that settle, timed (15) │ skipped (13) │ 9 steps, timed (13) │ probe
"""

from __future__ import annotations

from collections import deque

_MAX_PAUSE, _MAX_PAUSE_S = 256, 0.5
"""The longest pause, in steps and in seconds of plain decoding, whichever is longer.  If it were
longer, drafts would rest too long after other work has kept the machine busy."""

_AFFORDABLE_LOSS = 0.005
_INITIAL_GAIN = 0.1
"""The mean gain of a look that is assumed at first, as a share of a plain decoding step.  A look
moves the mean by one part in ``_NUM_WEIGHED_STEPS``, so looks that lose much may lose some three
such steps before the first pause."""

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
    """How long to go on looking for drafts that do not pay; all times are those of one sequence of
    a step, as steps of several numbers of sequences share them.

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
        step_s: a step of plain decoding, the unit of losses and of the longest pause.
        num_sequences: of a step.

    Attributes:
        is_look: whether to look for drafts in the present step.
        is_probe: whether it is a look only to see whether drafts pay again: a part of the sequences
            is enough for that.
        num_steps_since: if it is a look, how many plain steps came immediately before it.
    """

    def __init__(self, step_s: float, num_sequences: int) -> None:
        self._step_s = step_s
        self._max_pause = max(_MAX_PAUSE, int(_MAX_PAUSE_S / (step_s * num_sequences)))
        self._gain_s = step_s * _INITIAL_GAIN
        self._pause = 0
        self._num_steps_to_skip = 0
        self._num_looks = 0
        self._num_steps_in_a_row = 0
        """How many consecutive steps, up to the present one, were all plain or all looks."""
        self._has_gained = False
        self._has_compared = False
        """Whether a look has seemed to lose since the times of plain steps were dropped."""
        self.is_look, self.is_probe = True, False
        self.num_steps_since = 0
        self._resuming = _LastTimes()
        """The extra time of looks at the end of a pause, and of the plain steps after them."""
        self._settling_s = 0.0
        """The extra time of the plain steps after the last look."""
        self._alone, self._beside_prompts = _StepTimes(), _StepTimes()

    def skip_step(self) -> bool:
        """Skip a step in the middle of a pause, which neither looks nor is timed: the first steps
        of a pause tell the cost of the look before them, the last ones how long plain steps take.

        Returns:
            Whether it was skipped; if not, call :meth:`begin_step`.
        """
        is_settling = self.is_look or self._num_steps_in_a_row < _NUM_SETTLING_STEPS
        if is_settling or self._num_steps_to_skip <= _NUM_TIMED_STEPS:
            return False
        self._num_steps_to_skip -= 1
        self._num_steps_in_a_row += 1
        return True

    def begin_step(self) -> bool:
        """Begin a step; returns whether to look for drafts in it."""
        was_look, is_look = self.is_look, self._num_steps_to_skip <= 0
        self._num_steps_to_skip -= 1
        self.num_steps_since = 0 if was_look else self._num_steps_in_a_row
        self._num_steps_in_a_row = self._num_steps_in_a_row * (is_look == was_look) + 1
        self.is_look = is_look
        self.is_probe = is_look and self._pause > 0 and not self._has_gained
        if is_look and self._num_steps_in_a_row % _MAX_PAUSE == 0:
            self._has_compared = False
            for times in (self._alone, self._beside_prompts):
                times.plain.clear()
        return is_look

    def took(self, seconds: float, *, catching_up_s: float, beside_prompts: bool) -> None:
        """Learn what the present step took besides its forward and drafters' catching up."""
        times = self._beside_prompts if beside_prompts else self._alone
        if not self.is_look:
            is_settling = self._num_steps_in_a_row <= _NUM_SETTLING_STEPS
            if times.plain.is_known and is_settling:
                self._settling_s += max(0.0, seconds - times.plain.median)
            times.plain.add(seconds, is_settling=is_settling)
            return
        self._num_looks += 1
        if self.is_probe:
            times.probing_s = seconds
        if self._pause:
            looking_s, _ = self.beside_forward_s()
            more_s = max(0.0, seconds - looking_s)
            self._resuming.add(catching_up_s + more_s + self._settling_s)
        self._settling_s = 0.0
        if not (self.is_probe and times.looks.is_known):
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
        if self.is_probe and times.probing_s is not None:
            looking_s = min(times.probing_s, looking_s)
        return looking_s, min(times.plain.median, looking_s)

    def weigh(self, gain_s: float, as_plain_s: float) -> None:
        """Learn what drafting gained or lost in the present look, in seconds; ``as_plain_s`` is the
        plain decoding time of its tokens.  This decides when the next look comes."""
        if self._num_looks < _NUM_TIMED_STEPS:
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

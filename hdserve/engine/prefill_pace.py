"""How many prompt tokens a step takes while other sequences decode."""

from __future__ import annotations

from collections import deque
from statistics import median

MIN_TOKENS = 16
"""The fewest tokens of a chunk: a model takes about as long for fewer."""

_MAX_AGE_STEPS = 32
_NUM_MEASURES = 3
_MOST_CHANGE = 0.5


class PrefillPace:
    """Keeps steps short for those that decode, whatever a token of the prompt costs.

    A step that only decodes is the measure: with prompt tokens in it, a step may take ``slowdown``
    times as long.  Both are timed as they happen, so that the pace holds on any device and follows
    a prompt into its depth, where a token has more to attend to::

        seconds  |                     ┌─────┐ ┌────┐        slowdown x decoding
                 |                     │chunk│ │chk.│
                 | ┌──────┐ ┌──────┐   ├─────┤ ├────┤        decoding
                 | │decode│ │decode│   │dec. │ │dec.│
                 +-┴──────┴─┴──────┴───┴─────┴─┴────┴--> steps

    That is for one prompt.  Where several wait, each gets as much, so that they do not queue while
    few sequences decode.

    Thirty sequences decode for longer than one, so 1, 2 to 3, 4 to 7 sequences and so on have a
    measure each: the median of the last three.  Before it has three, and when none was taken for
    32 steps, a step leaves the prompts out.

    Args:
        max_tokens: most prompt tokens of any step.
        slowdown: above 1; None: prompts are not held back.
    """

    def __init__(self, max_tokens: int, slowdown: float | None) -> None:
        self._max_tokens = max_tokens
        self._min_tokens = min(MIN_TOKENS, max_tokens)
        self._slowdown = slowdown
        self._measures: dict[int, _Measure] = {}
        self._cost = _TokenCost()

    def num_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """Most prompt tokens of the next step; 0 where it is to be a measure.

        Args:
            num_decoding: sequences that decode in it.
            num_prompts: sequences whose prompts are not through, those that wait for a slot too.
        """
        if num_decoding == 0 or self._slowdown is None:
            return self._max_tokens
        measure = self._measure(num_decoding)
        if measure.is_due:
            return 0
        allowed_s = (self._slowdown - 1.0) * measure.seconds * num_prompts
        return max(self._min_tokens, self._cost.num_tokens(allowed_s, self._max_tokens))

    def observe(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn how long a step took in which ``num_decoding`` sequences decoded, at least one."""
        measure = self._measure(num_decoding)
        if num_prompt_tokens == 0:
            measure.add(seconds)
        else:
            measure.age_steps += 1
            self._cost.add(num_prompt_tokens, seconds, measure.seconds)

    def _measure(self, num_decoding: int) -> _Measure:
        return self._measures.setdefault(num_decoding.bit_length(), _Measure())


class _Measure:
    """How long a step takes that only decodes."""

    def __init__(self) -> None:
        self._last_s: deque[float] = deque(maxlen=_NUM_MEASURES)
        self.age_steps = 0

    @property
    def is_due(self) -> bool:
        return len(self._last_s) < _NUM_MEASURES or self.age_steps >= _MAX_AGE_STEPS

    @property
    def seconds(self) -> float:
        """0 before the first."""
        return median(self._last_s) if self._last_s else 0.0

    def add(self, seconds: float) -> None:
        self._last_s.append(seconds)
        self.age_steps = 0


class _TokenCost:
    """How long a token of a prompt takes, of the last chunks, the longer ones more.

    The first reading counts the whole step, so that chunks grow into their size, and later ones
    differ by at most half from what was expected: a stall is no measure, and short chunks, lost in
    what a step takes anyway, err to both sides alike.
    """

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._seconds = 0.0

    def num_tokens(self, seconds: float, most: int) -> int:
        """How many tokens take ``seconds``, at most ``most``; 0 before the first reading."""
        if not self._num_tokens:
            return 0
        if seconds * self._num_tokens >= most * self._seconds:
            return most
        return int(seconds * self._num_tokens / self._seconds)

    def add(self, num_tokens: int, step_s: float, decoding_s: float) -> None:
        seconds = step_s
        if self._num_tokens:
            expected_s = num_tokens * self._seconds / self._num_tokens
            most_s = expected_s * _MOST_CHANGE
            seconds = expected_s + min(max(step_s - decoding_s - expected_s, -most_s), most_s)
        self._num_tokens = self._num_tokens / 2 + num_tokens
        self._seconds = self._seconds / 2 + seconds

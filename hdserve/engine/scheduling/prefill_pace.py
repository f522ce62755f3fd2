"""How many prompt tokens a step takes while other sequences decode."""

from __future__ import annotations

from collections import deque
from statistics import median

MIN_TOKENS = 16
"""The fewest tokens of a chunk: a model takes about as long for fewer."""

_NUM_MEASURES = 3
"""A measure is the median of this many steps, since one may have been stalled by something else."""

_MAX_AGE_STEPS = 32
"""After this many steps with prompts, one runs without them: 3 % of a prompt's time."""

_MOST_CHANGE, _LEAST_SHARE = 0.5, 0.25

_LEAST_PART = 0.25
"""A chunk of a smaller part of what is allowed does not count: a model takes about as long for a
few tokens more, which says nothing of longer chunks, however often it is seen."""

_DEAR = 2.0
"""It does count if its step takes so many times what a step may: then its tokens are dear, as those
far into a prompt whose beginning is cached.  Few other delays are that long."""


class PrefillPace:
    """Keeps steps short for decoding sequences, whatever a prompt token costs.

    With prompt tokens, a step may take ``slowdown`` times as long as one that only decodes.  Both
    are timed while serving, so the pace fits any device and adapts as a prompt's tokens attend to
    more and more::

        seconds  |                     ┌─────┐ ┌────┐        slowdown x decoding
                 |                     │chunk│ │chk.│
                 | ┌──────┐ ┌──────┐   ├─────┤ ├────┤        decoding
                 | │decode│ │decode│   │dec. │ │dec.│
                 +-┴──────┴─┴──────┴───┴─────┴─┴────┴--> steps

    That is for one prompt.  If several have started, each adds the same allowance, so that prompts
    do not queue while few sequences decode.

    Thirty sequences take longer than one, so 1, 2 to 3, 4 to 7 sequences and so on have a time
    each: the median of the last three decode-only steps.  While there are fewer, or the last was 32
    steps ago, prompts are left out of a step.  So slower decoding during endless prompts is
    noticed within 66 steps of that many sequences.

    Args:
        max_tokens: most prompt tokens of any step.
        slowdown: above 1; ``None`` does not hold prompts back.
    """

    def __init__(self, max_tokens: int, slowdown: float | None) -> None:
        self._max_tokens = max_tokens
        self._min_tokens = min(MIN_TOKENS, max_tokens)
        self._slowdown = slowdown
        self._measures: dict[int, _Measure] = {}
        self._cost = _TokenCost()

    def num_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """Most prompt tokens of the next step; 0 if it is to measure decoding alone.

        Args:
            num_decoding: sequences that decode in it.
            num_prompts: sequences in slots whose prompts are not finished.
        """
        if num_decoding == 0 or self._slowdown is None:
            return self._max_tokens
        measure = self._measure(num_decoding)
        if measure.is_due:
            return 0
        return max(self._min_tokens, self._num_allowed(self._slowdown, measure, num_prompts))

    def _num_allowed(self, slowdown: float, measure: _Measure, num_prompts: int = 1) -> int:
        """How many prompt tokens take as much longer as they may; 0 before the first chunk."""
        allowed_s = (slowdown - 1.0) * measure.seconds * num_prompts
        return self._cost.num_tokens(allowed_s, self._max_tokens)

    def reset(self) -> None:
        """Forget all times: steps take a different time from now on."""
        self._measures.clear()
        self._cost = _TokenCost()

    def observe(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn how long a step took in which ``num_decoding`` sequences decoded, at least one."""
        if self._slowdown is None:
            return
        measure = self._measure(num_decoding)
        if num_prompt_tokens == 0:
            measure.add(seconds)
        else:
            measure.grow_older()
            is_dear = seconds > _DEAR * self._slowdown * measure.seconds
            least = _LEAST_PART * self._num_allowed(self._slowdown, measure)
            if is_dear or num_prompt_tokens >= least:
                self._cost.add(num_prompt_tokens, seconds, measure.seconds)

    def _measure(self, num_decoding: int) -> _Measure:
        number = num_decoding.bit_length()
        if number not in self._measures:
            self._measures[number] = _Measure()
        return self._measures[number]


class _Measure:
    """How long a step takes that only decodes."""

    def __init__(self) -> None:
        self._last_s: deque[float] = deque(maxlen=_NUM_MEASURES)
        self._age_steps = 0

    @property
    def is_due(self) -> bool:
        return len(self._last_s) < _NUM_MEASURES or self._age_steps >= _MAX_AGE_STEPS

    @property
    def seconds(self) -> float:
        """Only used once there is a time: steps with prompts come after at least one measure."""
        return median(self._last_s)

    def add(self, seconds: float) -> None:
        self._last_s.append(seconds)
        self._age_steps = 0

    def grow_older(self) -> None:
        """Count a step with prompts."""
        self._age_steps += 1


class _TokenCost:
    """How long a prompt token takes, from the last chunks.

    Decoding time varies by more than a short chunk takes, so a time counts the less the shorter its
    chunk: a Kalman filter whose own error is as large as its estimate, with noise of 0.7 of the
    decoding time.  A step counts as at most half more or less than expected, since a stall says
    nothing about tokens.  The first chunk counts as at least a quarter of its step, so that chunks
    start small and grow.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def num_tokens(self, seconds: float, most: int) -> int:
        """How many tokens take ``seconds``, at most ``most``; 0 before the first reading."""
        return int(min(most, seconds / self._seconds)) if self._seconds else 0

    def add(self, num_tokens: int, step_s: float, decoding_s: float) -> None:
        """Learn from a step that would have taken ``decoding_s`` without the chunk."""
        if not self._seconds:
            self._seconds = max(step_s - decoding_s, _LEAST_SHARE * step_s) / num_tokens
            return
        chunk_s = self._seconds * num_tokens
        expected_s = decoding_s + chunk_s
        most_s = _MOST_CHANGE * expected_s
        more_s = min(max(step_s - expected_s, -most_s), most_s)
        gain = chunk_s**2 / (chunk_s**2 + decoding_s**2 / 2)
        self._seconds += gain * more_s / num_tokens

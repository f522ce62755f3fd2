"""How many prompt tokens a step takes while other sequences decode."""

from __future__ import annotations

MIN_TOKENS = 16
"""The fewest tokens of a chunk: a model takes about as long for fewer."""

_MAX_AGE_STEPS = 32
_MOST_CHANGE = 2.0


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

    Where more sequences wait for their prompts than decode, prompts get so many times the time, so
    that a full machine does not decode a few at a time while the others wait.

    A measure older than 32 steps is taken anew: one step leaves the prompts out.

    Args:
        max_tokens: most prompt tokens of any step.
        slowdown: above 1.
    """

    def __init__(self, max_tokens: int, slowdown: float) -> None:
        self._max_tokens = max_tokens
        self._min_tokens = min(MIN_TOKENS, max_tokens)
        self._slowdown = slowdown
        self._num_tokens = float(self._min_tokens)
        self._share = 1.0
        self._decoding_s = 0.0
        self._age_steps = _MAX_AGE_STEPS

    def num_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """Most prompt tokens of the next step; 0 where it is to be a measure.

        Args:
            num_decoding: sequences that decode in it.
            num_prompts: sequences whose prompts are not through, those that wait for a slot too.
        """
        if num_decoding == 0:
            return self._max_tokens
        if self._age_steps >= _MAX_AGE_STEPS:
            return 0
        self._share = max(1.0, num_prompts / num_decoding)
        return min(int(self._num_tokens * self._share), self._max_tokens)

    def observe(self, num_prompt_tokens: int, seconds: float) -> None:
        """Learn how long a step took in which a sequence decoded."""
        if num_prompt_tokens == 0:
            before_s = self._decoding_s or seconds
            self._decoding_s = (before_s + min(seconds, _MOST_CHANGE * before_s)) / 2
            self._age_steps = 0
            return
        self._age_steps += 1
        allowed_s = (self._slowdown - 1.0) * self._decoding_s * self._share
        change = allowed_s / max(seconds - self._decoding_s, allowed_s / _MOST_CHANGE)
        is_end_of_prompt = num_prompt_tokens < int(self._num_tokens * self._share)
        change = min(max(change, 1 / _MOST_CHANGE), 1.0 if is_end_of_prompt else _MOST_CHANGE)
        self._num_tokens = min(max(self._num_tokens * change, self._min_tokens), self._max_tokens)

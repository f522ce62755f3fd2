"""The log probabilities that a whole answer may have, and a stream that waits to be read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from deployments.generation import GenerationRequest
    from hdserve.core import StepOutput

MAX_ANSWER_LOGPROBS = 1 << 20
"""The most log probabilities that a whole answer may have, over all choices and with alternatives:
some 75 MB of JSON, for which a gateway takes 0.2 GB and some 4.4 s of a thread.  On two busy cores
its loop then halted for 0.14 to 0.29 s at most (50,000 tokens, 20 others each).  A stream of a
response ends with four events of that size, written one by one.  Of other streams as many may wait
in the replica until the client reads them."""

_ASK_FOR_STREAM = "ask for a stream of a chat or completion, which has no such limit"


def check_possible_logprobs(num_tokens: int, num_each: int) -> None:
    """Check that an answer of as many tokens as the request allows would not have too many.

    Raises:
        InvalidRequest: it would.
    """
    if num_tokens * num_each > MAX_ANSWER_LOGPROBS:
        raise InvalidRequest(
            f"logprobs: {num_tokens} tokens, as many as all choices may have, with {num_each} log "
            f"probabilities each are over {MAX_ANSWER_LOGPROBS}; lower max_tokens, n or the number "
            f"of log probabilities, or {_ASK_FOR_STREAM}",
            "logprobs",
        )


class LogprobsCount:
    """Counts those of an answer while it is generated: without ``max_tokens``, nobody knows before
    how many tokens it will have.  Those of a stream count until they are sent."""

    def __init__(self, request: GenerationRequest) -> None:
        self._is_streamed = request.is_streamed
        self._num_tokens = self._num_logprobs = 0

    def add(self, output: StepOutput) -> None:
        """Count those of one output of any choice.

        Raises:
            InvalidRequest: there are too many.
        """
        if output.logprobs is None:
            return
        num_each = _num_each(output)
        self._num_tokens += len(output.logprobs)
        self._num_logprobs += len(output.logprobs) * num_each
        if self._num_logprobs > MAX_ANSWER_LOGPROBS:
            which = "wait to be read" if self._is_streamed else "the answer has so far"
            remedy = f"set max_tokens, or {_ASK_FOR_STREAM}"
            raise InvalidRequest(
                f"logprobs: the {self._num_tokens} tokens that {which} in all choices, with "
                f"{num_each} log probabilities each, are over {MAX_ANSWER_LOGPROBS}; "
                f"{'read faster' if self._is_streamed else remedy}",
                "logprobs",
            )

    def send(self, outputs: Iterable[StepOutput]) -> None:
        """Count those of a stream no longer that are being sent."""
        if not self._is_streamed:
            return
        for output in outputs:
            num_tokens = len(output.logprobs or ())
            self._num_tokens -= num_tokens
            self._num_logprobs -= num_tokens * _num_each(output)


def _num_each(output: StepOutput) -> int:
    return 1 + (output.sequence.params.logprobs or 0)

"""``prompt_logprobs``: the log probabilities of a prompt as vLLM shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field

from deployments.generation import TokenInfo
from deployments.openai.body import OptionalInteger
from hdserve.core import MAX_TOP_LOGPROBS
from hdserve.errors import InvalidRequest, Unsupported

_NAME = "prompt_logprobs"


class PromptLogprobFields(BaseModel):
    """The parameter of a generation request."""

    prompt_logprobs: OptionalInteger = Field(
        default=None, le=MAX_TOP_LOGPROBS, json_schema_extra={"minimum": 0}
    )

    def num_prompt_logprobs(self, *, is_streamed: bool) -> int | None:
        """Return how many of the likeliest tokens are shown at each place of a prompt; ``None``
        shows nothing, and so does 0 in a stream.

        Raises:
            Unsupported: the whole vocabulary is asked for.
            InvalidRequest: a stream would have to have them.
        """
        number = self.prompt_logprobs
        if number is None or (is_streamed and number == 0):
            return None
        if number < 0:
            reason = f"{_NAME} is 0 to {MAX_TOP_LOGPROBS}; the whole vocabulary (-1) is not offered"
            raise Unsupported(reason, _NAME)
        if is_streamed:
            raise InvalidRequest(f"{_NAME} are not available with stream: true", _NAME)
        return number


def shown_prompt(tokens: Iterable[TokenInfo], num_top: int) -> list[dict[str, Any] | None]:
    """Return, at each place of a prompt, the token that is there and the ``num_top`` likeliest, by
    token id; ``None`` for the first, which follows nothing."""
    return [None if token.logprob is None else _shown(token, num_top) for token in tokens]


def _shown(token: TokenInfo, num_top: int) -> dict[str, Any]:
    own = {str(token.token_id): _value(token.data, token.logprob, token.rank)}
    likeliest = enumerate(token.top[:num_top], start=1)
    return own | {str(top.token_id): _value(top.data, top.logprob, rank) for rank, top in likeliest}


def _value(data: bytes, logprob: float | None, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": data.decode(errors="replace")}

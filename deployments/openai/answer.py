"""What a choice has come to."""

from __future__ import annotations

from deployments.generation import Delta, TokenInfo
from deployments.openai.long_list import PackedTokens

_CHARACTERS_PER_ITEM = 6
"""Of a call's arguments, which take 0.7 us each to be read, where a log probability takes 4."""


class Answer:
    """One choice of an answer, as far as it has been collected."""

    def __init__(self, prompt_index: int) -> None:
        self.prompt_index = prompt_index
        self.reasoning: str | None = None
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: PackedTokens | None = None
        self.prompt_logprobs: tuple[TokenInfo, ...] = ()
        self.prompt_token_ids: tuple[int, ...] = ()
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def size(self) -> int:
        """The number of log probabilities, and of token ids where those of the prompt came, as then
        they are shown; text, in which calls are sought, counts by what reading it takes."""
        ids = (self.prompt_token_ids, self.token_ids) if self.prompt_token_ids else ()
        scores = filter(None, (self.prompt_logprobs, self.logprobs))
        num_scores = sum(len(each) * (1 + len(each[-1].top)) for each in scores)
        return sum(map(len, ids)) + num_scores + len(self.text) // _CHARACTERS_PER_ITEM

    def add(self, delta: Delta) -> None:
        """Append what came."""
        if delta.reasoning is not None:
            self.reasoning = (self.reasoning or "") + delta.reasoning
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.prompt_logprobs += delta.prompt_logprobs
        self.prompt_token_ids += delta.prompt_token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or PackedTokens()
            self.logprobs.add(delta.logprobs)

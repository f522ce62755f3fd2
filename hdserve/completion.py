"""The answer to one prompt, as offline use has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from hdserve.core import DraftCounts, FinishReason, Sequence, StepOutput, TokenLogprob


@dataclass(slots=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        counts: what drafting did for it.
        stop_reason: the stop string or the id among ``stop_token_ids`` that ended it, if one did.
        prompt_logprobs: if asked for, one per token of the prompt; the first token has none.
        error: the reason when ``finish_reason`` is ``ERROR``.
        prompt_token_ids: what the model was given; of a chat what its template makes of it.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    counts: DraftCounts
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: Exception | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    stop_reason: str | int | None = None

    @property
    def outputs(self) -> NoReturn:
        """Raises an ``AttributeError``: where other libraries have ``answer.outputs[0].text``, a
        prompt has one answer, ``answer.text``."""
        raise AttributeError("a prompt has one answer: for .outputs[0].text write .text")


def completion_of(seq: Sequence, outputs: Iterable[StepOutput]) -> Completion:
    """What all ``outputs`` of a sequence that has ended come to."""
    outputs = list(outputs)
    assert seq.finish_reason is not None
    logprobs = None
    if seq.params.logprobs is not None:
        logprobs = [item for output in outputs for item in output.logprobs or ()]
    prompt_logprobs = next(
        (output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None
    )
    return Completion(
        text="".join(output.text for output in outputs),
        token_ids=seq.output_token_ids,
        finish_reason=seq.finish_reason,
        logprobs=logprobs,
        counts=seq.counts,
        prompt_logprobs=None if prompt_logprobs is None else list(prompt_logprobs),
        error=outputs[-1].error,
        prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
        stop_reason=outputs[-1].stop_reason,
    )

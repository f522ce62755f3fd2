"""The answer to one prompt, in offline use."""

from __future__ import annotations

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
        prompt_token_ids: what the model was given; for a chat the result of its template.
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
        """Raises an ``AttributeError``: other libraries have ``answer.outputs[0].text``, but here a
        prompt has one answer, ``answer.text``."""
        raise AttributeError("a prompt has one answer: for .outputs[0].text write .text")


class CompletionBuilder:
    """Builds the answer to one prompt from its outputs, and keeps only what the answer needs: draft
    trees take several times its memory."""

    def __init__(self, seq: Sequence) -> None:
        self._seq = seq
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None if seq.params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._stop_reason: str | int | None = None
        self._error: Exception | None = None

    def add(self, output: StepOutput) -> None:
        """Add the next output."""
        self._texts.append(output.text)
        if self._logprobs is not None:
            self._logprobs += output.logprobs or ()
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = [*output.prompt_logprobs]
        if output.finish_reason is not None:
            self._texts = ["".join(self._texts)]
            self._stop_reason, self._error = output.stop_reason, output.error

    def completion(self) -> Completion:
        """The answer of a sequence that has ended."""
        seq = self._seq
        assert seq.finish_reason is not None
        return Completion(
            text="".join(self._texts),
            token_ids=seq.output_token_ids,
            finish_reason=seq.finish_reason,
            logprobs=self._logprobs,
            counts=seq.counts,
            prompt_logprobs=self._prompt_logprobs,
            error=self._error,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            stop_reason=self._stop_reason,
        )

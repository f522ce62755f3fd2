"""Offline use: a model in this process, without Ray and without a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from operator import index
from threading import RLock
from typing import Any

from hdserve import core
from hdserve.config import ModelConfig, checked
from hdserve.core import (
    DraftCounts,
    FinishReason,
    SamplingParams,
    SpeculationParams,
    StepOutput,
    TokenLogprob,
)
from hdserve.engine.engine import Engine
from hdserve.engine.host import ModelHost
from hdserve.errors import InvalidRequest

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, its token ids, or the messages of a chat."""

_NO_PROMPT = (
    "a prompt is a text, a list of token ids or a list of messages; generate takes a list of "
    "prompts: generate([prompt])"
)


@dataclass(slots=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        counts: what drafting did for it.
        prompt_logprobs: if asked for, one per token of the prompt; the first token has none.
        error: the reason when ``finish_reason`` is ``ERROR``.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    counts: DraftCounts
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: Exception | None = None


class LLM:
    """Generates text with one model; what it generates speeds up what it generates later.

    Several threads may use it: whoever needs a step runs it for all.

    Args:
        model: a bundled model's name, a local directory or a Hugging Face id.
        options: further fields of :class:`hdserve.config.ModelConfig`.

    Raises:
        ConfigError: there is no such model, or no such option.
        UnsupportedModel: its architecture is not served.
    """

    def __init__(self, model: str = "hdserve-tiny", **options: Any) -> None:
        config = checked(ModelConfig, {"name": model, "model": model, **options})
        self._host = ModelHost(config)
        self._engine = self._host.make_engine()
        self._numbers = count(1)
        self._outputs: dict[str, deque[StepOutput]] = {}
        """Outputs that nobody has taken yet, by the ids of the sequences that are decoded."""
        self._lock = RLock()
        """Guards everything above."""
        self._is_in_use = False
        """Whether the holder of the lock is using the engine.  The same thread may close an
        iterator meanwhile, as a collection of garbage does."""
        self._left: deque[str] = deque()
        """Requests that nobody asks for any more and that the engine has not been told of yet."""

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
    ) -> list[Completion]:
        """Answer all ``prompts``, decoded together, in their order.

        Args:
            params: default: the model's own, with a random seed for each prompt.  Given ones hold
                for all, the seed among them, so that an answer does not depend on what else is
                asked: equal prompts get equal answers, but for rounding where forwards are not
                exact (``engine.exact``).

        Raises:
            InvalidRequest: a prompt, which is named by its index, or a parameter cannot be used;
                nothing was generated.
        """
        if isinstance(prompts, str | Mapping):
            raise InvalidRequest("put the prompt into a list: generate([prompt])", "prompts")
        _check_params(params, speculation)
        sequences = []
        for number, prompt in enumerate(prompts):
            try:
                sequences.append(self._sequence(prompt, params, speculation))
            except InvalidRequest as error:
                raise type(error)(f"prompts[{number}]: {error.message}", error.param) from error
        outputs: dict[str, list[StepOutput]] = {seq.request_id: [] for seq in sequences}
        for output in self._decode(sequences):
            outputs[output.sequence.request_id].append(output)
        return [_completion(seq, outputs[seq.request_id]) for seq in sequences]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
    ) -> Iterator[StepOutput]:
        """Answer ``prompt`` step by step; the last output has the finish reason.

        Closing the iterator early ends the answer.

        Raises:
            InvalidRequest: the prompt or a parameter cannot be used; at the call.
        """
        _check_params(params, speculation)
        return self._decode([self._sequence(prompt, params, speculation)])

    def sampling(self, **chosen: Any) -> SamplingParams:
        """Sampling parameters: ``chosen`` over the model's own defaults, with a random seed.

        Raises:
            InvalidRequest: a value is out of range.
        """
        return self._host.params(chosen)

    def remember(self, outputs: Sequence[Sequence[int]]) -> None:
        """Draft from token ids that the model generated in another process, too."""
        with self._in_use():
            self._host.apply(self._host.config.name, core.DEFAULT_NAMESPACE, outputs)

    def _decode(self, sequences: Iterable[core.Sequence]) -> Iterator[StepOutput]:
        added = []
        try:
            for seq in sequences:
                with self._in_use() as engine:
                    added.append(seq)
                    self._outputs[seq.request_id] = deque()
                    engine.add(seq)
            for seq in added:
                yield from self._outputs_of(seq)
        finally:
            self._leave([seq.request_id for seq in added])

    @contextmanager
    def _in_use(self) -> Iterator[Engine]:
        """The engine, for this call alone; who leaves meanwhile leaves it then."""
        with self._lock:
            self._is_in_use = True
            try:
                yield self._engine
            finally:
                self._is_in_use = False
                self._let_leave()

    def _leave(self, request_ids: list[str]) -> None:
        """However often this is interrupted, the next call lets them leave."""
        with self._lock:
            self._left += request_ids
            if not self._is_in_use:
                self._let_leave()

    def _let_leave(self) -> None:
        self._is_in_use = True
        try:
            while self._left:
                request_id = self._left[0]  # those who leave meanwhile are behind it
                self._outputs.pop(request_id, None)
                self._engine.abort(request_id)
                self._left.popleft()
        finally:
            self._is_in_use = False

    def _outputs_of(self, seq: core.Sequence) -> Iterator[StepOutput]:
        """The outputs of one sequence; what a step gives others waits for whoever asks for it."""
        while True:
            output = self._next_output(seq.request_id)
            if output is None:
                return
            yield output
            if output.finish_reason is not None:
                return

    def _next_output(self, request_id: str) -> StepOutput | None:
        """``None`` when there will be none."""
        with self._lock:
            outputs = self._outputs[request_id]
            while not outputs and self._engine.has_work:
                self._step()
            return outputs.popleft() if outputs else None

    def _step(self) -> None:
        with self._in_use() as engine:
            found = engine.step()
        for output in found:
            outputs = self._outputs.get(output.sequence.request_id)
            if outputs is not None:  # whoever asked for it may have been interrupted
                outputs.append(output)

    def _sequence(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        speculation: SpeculationParams | None,
    ) -> core.Sequence:
        """
        Raises:
            InvalidRequest: it can never be answered.
        """
        seq = core.Sequence(
            request_id=str(next(self._numbers)),
            token_ids=self._token_ids(prompt),
            params=params or self._host.params({}),
            speculation=speculation or SpeculationParams(),
        )
        with self._lock:
            self._engine.check(seq)
        return seq

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._host.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            if not all(isinstance(message, Mapping) for message in prompt):
                raise InvalidRequest(_NO_PROMPT, "prompt")
            return self._host.tokenizer.encode_chat(prompt, {})  # type: ignore[arg-type]
        try:
            return [index(token) for token in prompt]  # type: ignore[arg-type]
        except TypeError as error:
            raise InvalidRequest(_NO_PROMPT, "prompt") from error


def _check_params(params: object, speculation: object) -> None:
    if not isinstance(params, SamplingParams | None):
        raise InvalidRequest("one SamplingParams holds for all prompts", "params")
    if not isinstance(speculation, SpeculationParams | None):
        raise InvalidRequest("one SpeculationParams holds for all prompts", "speculation")


def _completion(seq: core.Sequence, outputs: Iterable[StepOutput]) -> Completion:
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
    )

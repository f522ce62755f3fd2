"""Offline use: a model in this process, without Ray and without a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, islice
from operator import index
from os import PathLike, fspath
from threading import RLock
from typing import Any, Never

from hdserve import core
from hdserve.arguments import (
    NO_PROMPT,
    Message,
    chats_of,
    check_speculation,
    naming,
    params_of_each,
    prompts_of,
    refuse_keywords,
)
from hdserve.completion import Completion, CompletionBuilder
from hdserve.config import ModelConfig, checked
from hdserve.conversation import ChatEnd, for_template
from hdserve.core import SamplingParams, SpeculationParams, StepOutput
from hdserve.engine.engine import Engine
from hdserve.engine.hardware.workers import end_own_threads
from hdserve.engine.host import ModelHost
from hdserve.engine.request_check import check_token_ids
from hdserve.errors import HdserveError, InvalidRequest

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, its token ids, or the messages of a chat."""


class LLM:
    """Generates text with one model; what it generates speeds up later generation.

    Several threads may use it: whichever needs a step runs it for all, and they take turns.

    Args:
        model: a bundled model's name, a local directory or a Hugging Face id.
        options: further fields of :class:`hdserve.config.ModelConfig`.  Prompts go before decoding
            here, unless ``engine`` has a ``prefill_slowdown``.

    Raises:
        ConfigError: there is no such model, or no such option.
        UnsupportedModel: its architecture is not served.
    """

    def __init__(self, model: str | PathLike[str] = "hdserve-tiny", **options: Any) -> None:
        model = fspath(model) if isinstance(model, PathLike) else model
        name = model if isinstance(model, str) and model else "model"  # else told of both
        config = checked(ModelConfig, {"name": name, "model": model, **options})
        self._host = ModelHost(_at_full_speed(config))
        self._engine = self._host.make_engine()
        self._numbers = count(1)
        self._outputs: dict[str, deque[StepOutput]] = {}
        """Outputs that nobody has taken yet, by the ids of the sequences being decoded; those of
        one call share a queue."""
        self._lock = RLock()
        """Guards everything above."""
        self._turn = RLock()
        """Held by the thread that is the next to have the other lock."""
        self._is_in_use = False
        """Whether the holder of the lock is using the engine.  The same thread may close an
        iterator meanwhile, as garbage collection does."""
        self._dropped: deque[str] = deque()
        """Requests that nobody waits for any more, of which the engine has not been told yet."""

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationParams | None = None,
        **unknown: Never,
    ) -> list[Completion]:
        """Answer all ``prompts``, decoded together, in their order.

        Args:
            params: one for each prompt, or one for all.  The seed is part of it, so an answer does
                not depend on the other prompts: equal prompts get equal answers, apart from
                rounding if forwards are not exact (``engine.exact``).  Default: the model's, with a
                random seed for each prompt.

        Raises:
            InvalidRequest: a prompt, which is named by its index, or an argument cannot be used;
                nothing was generated.
        """
        refuse_keywords(unknown)
        asked = prompts_of(prompts)
        return self._answer(asked, self._token_ids, params, speculation, "prompts[{}]")

    def as_completed(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationParams | None = None,
        **unknown: Never,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Answer ``prompts`` as :meth:`generate` does, and yield each answer when it ends, with the
        index of its prompt; the next prompt then takes its place.

        A prompt is tokenized when there is a place for it, so there may be any number of them.

        Raises:
            InvalidRequest: an argument cannot be used, raised by the call itself; or a prompt,
                which is named by its index, raised when it is its turn.
        """
        refuse_keywords(unknown)
        check_speculation(speculation)
        asked = prompts_of(prompts)
        each = params_of_each(params, len(asked))
        return self._as_completed(
            self._sequences(asked, self._token_ids, each, speculation, "prompts[{}]")
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **unknown: Never,
    ) -> list[Completion]:
        """Answer the messages of a chat, or of several, by the model's chat template.

        Args:
            params: as in :meth:`generate`; one for each chat, or one for all.
            tools: functions that the template shows the model, in the form of the OpenAI API.  An
                answer that calls one has the call in its text.
            chat_template_kwargs: variables of the template, such as ``enable_thinking``,
                over those of ``defaults``.
            add_generation_prompt: whether the beginning of an assistant's message follows the
                messages.  Default: unless the last message is continued.
            continue_final_message: whether the answer continues the content of the last message,
                which may be the beginning of an answer.

        Returns:
            One answer for each chat, so for a single chat a list of one.

        Raises:
            InvalidRequest: a chat, which is named by its index if there are several, or an argument
                cannot be used; nothing was generated.
        """
        refuse_keywords(unknown)
        chats, is_single = chats_of(messages)
        encode = partial(
            self._encode_chat,
            template_options=chat_template_kwargs or {},
            tools=tools,
            end=ChatEnd.of(add_generation_prompt, continue_final_message),
        )
        where = "" if is_single else "messages[{}]"
        return self._answer(chats, encode, params, speculation, where)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        **unknown: Never,
    ) -> Generator[StepOutput, None, None]:
        """Answer ``prompt`` step by step; the last output has the finish reason.

        Closing the iterator early ends the answer.

        Raises:
            InvalidRequest: the prompt or an argument cannot be used; raised by the call itself.
        """
        refuse_keywords(unknown)
        if not isinstance(params, SamplingParams | None):
            raise InvalidRequest("params is one SamplingParams", "params")
        check_speculation(speculation)
        return self._decode([self._sequence(self._token_ids(prompt), params, speculation)])

    def sampling(self, **chosen: Any) -> SamplingParams:
        """Sampling parameters: ``chosen`` over the model's defaults, with a random seed.

        Raises:
            InvalidRequest: a value is out of range.
        """
        return self._host.params(chosen)

    def encode(self, text: str, *, adds_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, by default those of a prompt that is this text.

        Args:
            adds_special_tokens: whether those that the tokenizer puts around a prompt are added.

        Raises:
            InvalidRequest: it is not a text.
        """
        if not isinstance(text, str):
            raise InvalidRequest("encode takes a text", "text")
        return self._host.tokenizer.encode(text, adds_special_tokens=adds_special_tokens)

    def decode(self, token_ids: Iterable[int], *, skips_special_tokens: bool = False) -> str:
        """The text of token ids.

        Raises:
            InvalidRequest: they are not ids of the model's vocabulary.
        """
        given = [*token_ids]  # an iterator can be read only once
        check_token_ids("token_ids", given, self._host.model.vocab_size)
        ids = [index(token_id) for token_id in given]
        return self._host.tokenizer.decode(ids, skips_special_tokens=skips_special_tokens)

    def remember(self, outputs: Sequence[Sequence[int]]) -> None:
        """Also draft from token ids that the model generated in another process.

        Raises:
            InvalidRequest: they are not lists of token ids; nothing is remembered.
        """
        try:
            found = [[index(token) for token in output] for output in outputs]
        except TypeError as error:
            reason = "outputs are lists of token ids: remember([answer.token_ids])"
            raise InvalidRequest(reason, "outputs") from error
        for token_ids in found:
            check_token_ids("outputs", token_ids, self._host.model.vocab_size)
        with self._in_use():
            self._host.apply(self._host.config.name, core.DEFAULT_NAMESPACE, found)

    def _answer(
        self,
        prompts: Sequence[Any],
        encode: Callable[[Any], list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        speculation: SpeculationParams | None,
        where: str,
    ) -> list[Completion]:
        """
        Args:
            where: for error messages, which add the index of the wrong one of ``prompts``.
        """
        check_speculation(speculation)
        each = params_of_each(params, len(prompts))
        sequences = [*self._sequences(prompts, encode, each, speculation, where)]
        answers = {seq.request_id: CompletionBuilder(seq) for seq in sequences}
        for output in self._decode(sequences):
            answers[output.sequence.request_id].add(output)
        return [answer.completion() for answer in answers.values()]

    def _sequences(
        self,
        prompts: Sequence[Any],
        encode: Callable[[Any], list[int]],
        params: Iterable[SamplingParams | None],
        speculation: SpeculationParams | None,
        where: str,
    ) -> Iterator[core.Sequence]:
        for number, own in enumerate(params):
            with naming(where.format(number)):
                seq = self._sequence(encode(prompts[number]), own, speculation)
            yield seq

    def _as_completed(
        self, sequences: Iterable[core.Sequence]
    ) -> Generator[tuple[int, Completion], None, None]:
        """The answers of ``sequences`` as they end, each with the index of its sequence."""
        answers: dict[str, tuple[int, CompletionBuilder]] = {}

        def started() -> Iterator[core.Sequence]:
            for number, seq in enumerate(sequences):
                answers[seq.request_id] = number, CompletionBuilder(seq)
                yield seq

        for output in self._decode(started(), self._host.config.engine.max_num_sequences):
            number, answer = answers[output.sequence.request_id]
            answer.add(output)
            if output.finish_reason is not None:
                del answers[output.sequence.request_id]
                yield number, answer.completion()

    def _decode(
        self, sequences: Iterable[core.Sequence], most: int | None = None
    ) -> Generator[StepOutput, None, None]:
        """The outputs of all ``sequences`` as they come; outputs of other calls' sequences are kept
        for those.

        Args:
            most: how many of ``sequences`` the engine has at a time; ``None``: all.
        """
        left = iter(sequences)
        running: dict[str, None] = {}  # in the order in which they wait
        outputs: deque[StepOutput] = deque()
        try:
            while True:
                for seq in islice(left, None if most is None else most - len(running)):
                    running[seq.request_id] = None
                    with self._in_use() as engine:
                        self._outputs[seq.request_id] = outputs
                        engine.add(seq)
                if not running:
                    return
                for output in self._next_outputs(outputs):
                    if output.finish_reason is not None:
                        del running[output.sequence.request_id]
                    yield output
        finally:
            self._drop(running)
            end_own_threads()  # otherwise another thread's steps would take far longer

    @contextmanager
    def _in_use(self) -> Iterator[Engine]:
        """The engine, for this call only; requests dropped meanwhile are removed afterwards.

        A thread that waits for it has it before the one that has it now has it again.
        """
        try:
            self._turn.acquire()
            with self._lock:
                self._give_turn()
                self._is_in_use = True
                try:
                    yield self._engine
                finally:
                    self._is_in_use = False
                    self._abort_dropped()
        finally:
            self._give_turn()

    def _give_turn(self) -> None:
        """Let another thread be the next, also if this was interrupted the last time."""
        with suppress(RuntimeError):  # it is not this thread's any more
            while True:
                self._turn.release()

    def _drop(self, request_ids: Iterable[str]) -> None:
        """However often this is interrupted, the next call removes them.

        Waits for nobody: garbage may be collected in a thread for which the step under way waits.
        """
        self._dropped += request_ids
        if self._lock.acquire(blocking=False):
            try:
                if not self._is_in_use:
                    self._abort_dropped()
            finally:
                self._lock.release()

    def _abort_dropped(self) -> None:
        self._is_in_use = True
        try:
            while self._dropped:
                request_id = self._dropped[0]  # those added meanwhile come after it
                self._outputs.pop(request_id, None)
                self._engine.abort(request_id)
                self._dropped.popleft()
        finally:
            self._is_in_use = False

    def _next_outputs(self, outputs: deque[StepOutput]) -> list[StepOutput]:
        """Take all that is in a call's queue, at least one output.

        Raises:
            HdserveError: there will be none.
        """
        while True:
            with self._in_use() as engine:
                if engine.has_outputs:  # a call was interrupted before it had delivered them
                    engine.hand_out(self._receive)
                if outputs:
                    found = [*outputs]
                    outputs.clear()
                    return found
                if not engine.has_work:
                    raise HdserveError("nothing more is decoded for this request, nobody knows why")
                self._host.use_own_num_threads()
                engine.run()
                engine.hand_out(self._receive)

    def _receive(self, output: StepOutput) -> None:
        """If this is interrupted, ``output`` is delivered again before anybody takes it."""
        request_id = output.sequence.request_id
        outputs = self._outputs.get(request_id)
        if outputs is None:
            return  # it was taken, or whoever asked for it was interrupted
        if not outputs or outputs[-1] is not output:
            outputs.append(output)
        if output.finish_reason is not None:
            del self._outputs[request_id]

    def _sequence(
        self,
        token_ids: list[int],
        params: SamplingParams | None,
        speculation: SpeculationParams | None,
    ) -> core.Sequence:
        """
        Raises:
            InvalidRequest: it can never be answered.
        """
        seq = core.Sequence(
            request_id=str(next(self._numbers)),
            token_ids=token_ids,
            params=params or self._host.params({}),
            speculation=speculation or SpeculationParams(),
        )
        if seq.params.grammar is not None:  # compiling takes seconds, in which others continue
            seq.grammar_state = self._host.grammars.state(seq.params.grammar)
        with self._in_use() as engine:
            engine.check(seq)
        seq.seen_tokens = self._host.seen_tokens(seq.params, token_ids)
        return seq

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, bytes | bytearray):  # bytes are not token ids
            raise InvalidRequest(NO_PROMPT, "prompt")
        if isinstance(prompt, str):
            return self._host.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            if not all(isinstance(message, Mapping) for message in prompt):
                raise InvalidRequest(NO_PROMPT, "prompt")
            return self._encode_chat(prompt, {})  # type: ignore[arg-type]
        try:
            return [index(token) for token in prompt]  # type: ignore[arg-type]
        except TypeError as error:
            raise InvalidRequest(NO_PROMPT, "prompt") from error

    def _encode_chat(
        self,
        messages: Sequence[Message],
        template_options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        end: ChatEnd = ChatEnd.BEFORE_ANSWER,
    ) -> list[int]:
        messages = for_template(messages)
        return self._host.tokenizer.encode_chat(messages, template_options, tools, end)


def _at_full_speed(config: ModelConfig) -> ModelConfig:
    """``config`` without prefill pacing, unless it sets one: no client waits for the next token of
    a stream (docs/adr/0037)."""
    if "prefill_slowdown" in config.engine.model_fields_set:
        return config
    engine = config.engine.model_copy(update={"prefill_slowdown": None})
    return config.model_copy(update={"engine": engine})

"""The records of one request, while its sequences are decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from deployments.generation import HEARTBEAT, Delta, GenerationRequest, Records
from deployments.off_loop import off_loop
from deployments.replica.answer_logprobs import LogprobsCount
from deployments.replica.heartbeat import Heartbeat, beats_until
from deployments.replica.reasoning_reader import ReasoningReader, ReasoningReaders
from deployments.replica.record_builder import RecordBuilder
from deployments.replica.request_metrics import RequestClock, RequestMetrics
from deployments.tracing import GenerationTrace, SequenceTrace
from hdserve.core import Sequence, StepOutput
from hdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from hdserve.engine.async_engine import AsyncEngine

Item = StepOutput | BaseException | Records | None
"""An output of a sequence, or a heartbeat; ``None`` means that one sequence has ended."""

Outputs = asyncio.Queue[Item]

_MAX_SIZE = 2048
"""How many tokens, log probabilities and drafts that are shown go into one message, and one output
more: what has gathered while a client did not read would else hold up replica and gateway for
seconds, or be too long for a message.  An output takes the gateway 27 us, each log probability
7 us."""


class RecordStreams:
    """Makes an engine decode the sequences of requests, and yields the results.

    Args:
        requests: gets a clock for each sequence.
        reasoning: separates reasoning from text.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        builder: RecordBuilder,
        requests: RequestMetrics,
        reasoning: ReasoningReaders,
    ) -> None:
        self._engine = engine
        self._builder = builder
        self._requests = requests
        self._reasoning = reasoning

    async def stream(
        self,
        request: GenerationRequest,
        sequences: list[Sequence],
        trace: GenerationTrace,
        arrived_s: float,
    ) -> AsyncGenerator[Records]:
        """Yield what has come at a time, if it is not too much: deltas of running sequences, and
        the summary when all have ended; in silences heartbeats, if the request asks for them.

        Args:
            arrived_s: the monotonic time at which the replica got the request, before its sequences
                were built.

        Raises:
            RequestError: a sequence cannot be decoded; its parameter has the client's name
                for it.
            InvalidRequest: a whole answer comes to have too many log probabilities, or a stream
                that is not read.
            EngineStopped: the engine has failed.
        """
        merged: Outputs = asyncio.Queue()
        clocks = [self._requests.clock(seq, arrived_s) for seq in sequences]
        readers = self._reasoning.of(request, sequences)
        shows_prompts = request.prompt_logprobs_param is not None
        prompts = _prompts(sequences, request.num_choices) if request.includes_prompts else {}
        count = LogprobsCount(request)
        tasks = [
            asyncio.create_task(
                self._pump(
                    seq,
                    clock,
                    merged,
                    trace.sequence(seq, arrived_s),
                    count,
                    keeps_drafts=request.includes_sources,
                )
            )
            for seq, clock in zip(sequences, clocks, strict=True)
        ]
        deltas = partial(
            self._builder.deltas,
            reasoning=readers,
            includes_sources=request.includes_sources,
            due_prompts=set(range(request.num_prompts)) if shows_prompts else None,
        )
        heartbeat = Heartbeat(partial(_beat, merged), request.heartbeat_s)
        try:
            num_open, records = len(tasks), tuple[Delta, ...]()
            with heartbeat:
                while num_open:
                    items = await _taken(merged, shows_drafts=request.includes_sources)
                    heartbeat.is_silent = False
                    outputs = [item for item in items if isinstance(item, StepOutput)]
                    num_open -= items.count(None)
                    count.send(outputs)
                    found = await off_loop(_num_prompt_logprobs(outputs), deltas, outputs)
                    records = tuple(_with_prompts(found, prompts))
                    if num_open and (records or HEARTBEAT in items):
                        yield records
                    for item in items:
                        if isinstance(item, BaseException):
                            raise as_asked(item, request)
            last = self._last(records, request, sequences, clocks, readers, trace)
            async with aclosing(last) as found_last:
                async for message in found_last:
                    yield message
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _last(
        self,
        deltas: tuple[Delta, ...],
        request: GenerationRequest,
        sequences: list[Sequence],
        clocks: list[RequestClock],
        readers: Mapping[str, ReasoningReader],
        trace: GenerationTrace,
    ) -> AsyncGenerator[Records]:
        """Yield the last ``deltas`` and the summary, which comes by itself where counting a
        prediction may take a while."""
        if request.prediction and deltas:
            yield deltas
            deltas = ()
        size = len(request.prediction or "") * request.num_choices
        known = (request, sequences, clocks, readers.values())
        counting = asyncio.ensure_future(off_loop(size, self._builder.summary, *known))
        async with aclosing(beats_until(counting, request.heartbeat_s)) as beats:
            async for beat in beats:
                yield beat
        summary = counting.result()
        trace.summarise(summary)
        yield (*deltas, summary)

    async def _pump(
        self,
        seq: Sequence,
        clock: RequestClock,
        merged: Outputs,
        spans: SequenceTrace,
        count: LogprobsCount,
        *,
        keeps_drafts: bool,
    ) -> None:
        outputs = self._engine.generate(seq)
        try:
            async for output in outputs:
                clock.observe(output)
                spans.observe(output)
                if output.error is not None:
                    if output.token_ids:  # a grammar failed behind them
                        merged.put_nowait(replace(output, finish_reason=None))
                    raise output.error
                count.add(output)
                merged.put_nowait(output if keeps_drafts else replace(output, draft=None))
            merged.put_nowait(None)
        except Exception as error:
            merged.put_nowait(error)
        finally:
            spans.end()
            await outputs.aclose()


def _beat(merged: Outputs) -> None:
    """Have a heartbeat sent, unless something else is about to be."""
    if merged.empty():
        merged.put_nowait(HEARTBEAT)


def _prompts(sequences: list[Sequence], num_choices: int) -> dict[int, tuple[int, ...]]:
    """Return the prompt of each ``num_choices`` of ``sequences``, which have no output yet, by its
    index."""
    return {number: tuple(seq.token_ids) for number, seq in enumerate(sequences[::num_choices])}


def _with_prompts(deltas: Iterable[Delta], prompts: dict[int, tuple[int, ...]]) -> Iterator[Delta]:
    """Yield ``deltas``; the first one of each prompt in ``prompts`` takes the prompt with it."""
    for delta in deltas:
        found = prompts.pop(delta.prompt_index, None)
        yield delta if found is None else delta._replace(prompt_token_ids=found)


def as_asked(error: BaseException, request: GenerationRequest) -> BaseException:
    """Return ``error`` with the client's names for the prompt of a chat and for a
    grammar."""
    names = {"grammar": request.grammar_param}
    if request.messages:
        names["prompt"] = "messages"
    if isinstance(error, InvalidRequest) and error.param in names:
        return type(error)(error.message, names[error.param])
    return error


def _num_prompt_logprobs(outputs: Iterable[StepOutput]) -> int:
    """Return how many prompt log probabilities the outputs have, including alternatives."""
    return sum(
        len(output.prompt_logprobs) * (1 + (output.sequence.params.prompt_logprobs or 0))
        for output in outputs
        if output.prompt_logprobs is not None
    )


async def _taken(items: Outputs, *, shows_drafts: bool) -> list[Item]:
    """Take what is in the queue, as far as one message may have; wait for at least one item."""
    found = [await items.get()]
    size = _size(found[0], shows_drafts=shows_drafts)
    while size <= _MAX_SIZE and not items.empty():
        found.append(items.get_nowait())
        size += _size(found[-1], shows_drafts=shows_drafts)
    return found


def _size(item: Item, *, shows_drafts: bool) -> int:
    """Return how many tokens and log probabilities of the answer an item has, and drafts if they
    are shown; at least 1."""
    if not isinstance(item, StepOutput):
        return 1
    num_drafts = len(item.draft) if shows_drafts and item.draft is not None else 0
    return 1 + num_drafts + len(item.token_ids) * (1 + (item.sequence.params.logprobs or 0))

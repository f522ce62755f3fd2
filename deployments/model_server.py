"""One replica of one model: tokenizer, engine and local databases behind a streaming call."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import ExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ray import serve

from deployments.generation import Delta, GenerationRequest, ModelInfo, Records, Summary
from deployments.metrics import Observations, Report
from deployments.ray_metrics import Reporter
from deployments.reasoning_parsers import REASONING_PARSERS
from deployments.reasoning_reader import ReasoningReaders
from deployments.record_builder import RecordBuilder
from deployments.replica_metrics import ReplicaMetrics
from deployments.request_faults import streams_faults, tells_faults
from deployments.request_metrics import RequestClock, RequestMetrics
from deployments.sequence_builder import SequenceBuilder
from deployments.sharing import ClusterSharing
from deployments.statistics import ChosenStatistics, locate_statistics
from deployments.statistics_state import StatisticsState
from deployments.tracing import GenerationTrace, Tracing
from hdserve.config import ModelConfig, ModelDatabaseConfig, TelemetryConfig
from hdserve.core import Sequence, StepOutput
from hdserve.engine.processors import default_num_threads
from hdserve.errors import InvalidRequest

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_SILENCE_S = 120.0
_FAREWELL_S = 2.0
_FAREWELL_PAUSE_S = 0.2

_MAX_INLINE_SIZE = 4096
"""In bytes of a request, or characters or tokens of a text: what reads more runs in a thread.
Tokens of 1 MB take seconds, in which no stream would go on."""


class ModelServer:
    """Hosts a model; Ray Serve runs ``num_replicas`` of it.

    A :class:`RequestError` reaches the gateway as a value (:mod:`deployments.request_faults`).

    Args:
        num_models: served beside this one, itself counted; they may share a node.
        statistics_root: see :class:`~hdserve.config.ServeConfig`.
    """

    def __init__(
        self,
        config: ModelConfig,
        database_config: ModelDatabaseConfig,
        num_models: int,
        telemetry: TelemetryConfig,
        statistics_root: Path | None = None,
    ) -> None:
        self._closing = ExitStack()
        # Seconds and 250 MB, which the process that builds the application does without.
        from hdserve.engine.async_engine import AsyncEngine
        from hdserve.engine.host import ModelHost

        self._config = config
        self._tracing = Tracing(telemetry, "hdserve-model")
        self._closing.callback(self._tracing.close)
        self._sharing: ClusterSharing | None = None
        self._closing.callback(self._close_sharing)
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._host = ModelHost(
            config,
            max_database_bytes=database_config.max_bytes,
            num_threads=default_num_threads(config.num_cpus, num_models),
            locate_statistics=locate_statistics,
            on_output=self._publish,
            is_server=True,
        )
        self._tokenizer = self._host.tokenizer
        self._model = self._host.model
        self._sequence_builder = SequenceBuilder(self._host)
        self._record_builder = RecordBuilder(self._tokenizer, self._replica)
        parser = REASONING_PARSERS.get(config.reasoning_parser or "")
        self._reasoning = ReasoningReaders(parser, self._tokenizer)
        self._engine = AsyncEngine(
            self._host.make_engine, config.engine.max_num_open, on_failure=self._leave
        )
        self._closing.callback(self._engine.close)
        self._engine.start()
        if database_config.is_enabled:
            sharing = ClusterSharing(self._host, self._engine, database_config, self._replica)
            sharing.start()
            self._sharing = sharing
        self._chosen = ChosenStatistics(self._host, self._engine, statistics_root)
        self._closing.callback(self._chosen.close)
        self._chosen.start()
        observations = Observations()
        self._requests = RequestMetrics(observations)
        self._metrics = ReplicaMetrics(
            self._replica,
            self._host,
            self._engine,
            self._requests,
            self._sharing,
            self._chosen,
            observations,
        )
        labels = {"model_name": config.name}
        reporter = Reporter(config.name, labels, self._metrics.report, observations)
        self._closing.callback(reporter.close)
        reporter.start()

    def _publish(self, namespace: str, token_ids: list[int]) -> None:
        if self._sharing is not None:
            self._sharing.publish(namespace, token_ids)

    @streams_faults
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        """Answer ``request``: the deltas of all choices as they come, then a summary.

        What has come since the last records were sent goes together: nothing waits, and the fewer
        messages this process can send, the more each carries.

        Raises:
            RequestError: the request cannot be answered.
            Overloaded: as many sequences wait as may; another replica may answer.
            EngineGone: the engine had failed before; another replica may answer.
            EngineStopped: the engine has failed.
        """
        with self._requests.refusals():
            async with aclosing(self._answer(request)) as found:
                async for records in found:
                    yield records

    async def _answer(self, request: GenerationRequest) -> AsyncGenerator[Records]:
        self._engine.check_room(request.num_sequences)
        request = self._reasoning.prepared(request)
        with self._tracing.generation(request, self._config.name) as trace:
            build = self._sequence_builder.build
            sequences = await _off_loop(request.num_body_bytes, build, request)
            if self._sharing is not None:
                self._sharing.use(request.namespace)
            async with aclosing(self._records(request, sequences, trace)) as found:
                async for records in found:
                    yield records

    async def _records(
        self, request: GenerationRequest, sequences: list[Sequence], trace: GenerationTrace
    ) -> AsyncGenerator[Records]:
        """What came together: deltas of running sequences, and the summary when all have ended."""
        merged: asyncio.Queue[StepOutput | BaseException | None] = asyncio.Queue()
        clocks = [self._requests.clock(seq) for seq in sequences]
        readers = self._reasoning.of(request, sequences)
        shows_prompts = request.prompt_logprobs_param is not None
        tasks = [
            asyncio.create_task(self._pump(seq, clock, merged, trace))
            for seq, clock in zip(sequences, clocks, strict=True)
        ]
        deltas = partial(
            self._record_builder.deltas,
            reasoning=readers,
            includes_sources=request.includes_sources,
            due_prompts=set(range(request.num_prompts)) if shows_prompts else None,
        )
        try:
            num_open = len(tasks)
            while num_open:
                items = await _all_of(merged)
                outputs = [item for item in items if isinstance(item, StepOutput)]
                num_open -= items.count(None)
                records: list[Delta | Summary] = [
                    *await _off_loop(_num_prompt_logprobs(outputs), deltas, outputs)
                ]
                if not num_open:
                    if request.prediction and records:  # to count it may take a while
                        yield tuple(records)
                        records = []
                    size = len(request.prediction or "") * request.num_choices
                    build = self._record_builder.summary
                    known = (request, sequences, clocks, readers.values())
                    summary = await _off_loop(size, build, *known)
                    trace.summarise(summary)
                    records.append(summary)
                if records:
                    yield tuple(records)
                for item in items:
                    if isinstance(item, BaseException):
                        raise _as_asked(item, request)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self,
        seq: Sequence,
        clock: RequestClock,
        merged: asyncio.Queue[StepOutput | BaseException | None],
        trace: GenerationTrace,
    ) -> None:
        outputs, spans = self._engine.generate(seq), trace.sequence(seq)
        try:
            async for output in outputs:
                clock.observe(output)
                spans.observe(output)
                if output.error is not None:
                    raise output.error
                merged.put_nowait(output)
            merged.put_nowait(None)
        except Exception as error:
            merged.put_nowait(error)
        finally:
            spans.end()
            await outputs.aclose()

    @tells_faults
    async def tokenize(self, text: str, adds_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        encode = partial(self._tokenizer.encode, adds_special_tokens=adds_special_tokens)
        return await _off_loop(len(text), encode, text)

    @tells_faults
    async def tokenize_chat(self, messages: list[dict[str, Any]], num_body_bytes: int) -> list[int]:
        """The token ids of a conversation that came in a body of so many bytes."""
        return await _off_loop(num_body_bytes, self._tokenizer.encode_chat, messages, {})

    @tells_faults
    async def detokenize(self, token_ids: list[int], param: str) -> str:
        """The text of token ids that came as the parameter ``param``.

        Raises:
            InvalidRequest: an id is not in the vocabulary.
        """
        if any(not 0 <= token_id < self._model.vocab_size for token_id in token_ids):
            raise InvalidRequest("a token id is not in the vocabulary", param)
        return await _off_loop(len(token_ids), self._tokenizer.decode, token_ids)

    async def describe(self) -> ModelInfo:
        """What this replica is, has and does."""
        stats, max_total_tokens, is_compiled, is_exact = await self._engine.ask(
            lambda engine: (
                engine.stats,
                engine.max_total_tokens,
                engine.is_compiled,
                engine.is_exact,
            )
        )
        return ModelInfo(
            name=self._config.name,
            max_model_len=max_total_tokens,
            dtype=str(self._model.dtype).removeprefix("torch."),
            device=str(self._model.device),
            is_compiled=is_compiled,
            is_exact=is_exact,
            num_threads=self._host.num_threads,
            num_slots=self._config.engine.max_num_sequences,
            num_kv_tokens=stats.num_kv_tokens,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            weight_bytes=self._model.weight_bytes,
            drafters=tuple(drafter.name for drafter in self._config.drafting.drafters),
            tokenizer_fingerprint=self._tokenizer.fingerprint,
        )

    @tells_faults
    async def check_statistics(self, directory: str) -> None:
        """Whether the administrator may choose this statistics database, and it is right.

        Raises:
            InvalidRequest: says why not.
        """
        await asyncio.to_thread(self._chosen.open, directory)

    async def statistics(self) -> StatisticsState:
        """From which statistics database this replica drafts."""
        return StatisticsState.of(self._replica, self._host.statistics)

    async def report(self) -> Report:
        """What this replica counted, for ``/metrics``."""
        return await self._metrics.report()

    def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises."""
        self._engine.check(_MAX_SILENCE_S)

    def _leave(self) -> None:
        """End this process now that its engine has failed, so that Ray Serve replaces it at once:
        it waits for three failed health checks, else.  Called in the engine's thread."""
        if self._sharing is not None:
            self._sharing.close()
        deadline_s = time.monotonic() + _FAREWELL_S
        while self._engine.num_open and time.monotonic() < deadline_s:
            time.sleep(_FAREWELL_PAUSE_S)
        time.sleep(_FAREWELL_PAUSE_S)  # the last errors are on their way
        logger.error("the engine has failed: this replica ends, to be replaced")
        logging.shutdown()
        os._exit(1)

    def __del__(self) -> None:
        """Ray Serve calls it once the last request has ended: publish what is not yet."""
        self._closing.close()

    def _close_sharing(self) -> None:
        if self._sharing is not None:
            self._sharing.close()


def _as_asked(error: BaseException, request: GenerationRequest) -> BaseException:
    """The prompt of a chat, and a grammar, are called as the client knows them."""
    names = {"grammar": request.grammar_param}
    if request.messages:
        names["prompt"] = "messages"
    if isinstance(error, InvalidRequest) and error.param in names:
        return type(error)(error.message, names[error.param])
    return error


def _num_prompt_logprobs(outputs: Iterable[StepOutput]) -> int:
    """With the alternatives."""
    return sum(
        len(output.prompt_logprobs) * (1 + (output.sequence.params.prompt_logprobs or 0))
        for output in outputs
        if output.prompt_logprobs is not None
    )


async def _all_of(items: asyncio.Queue[T]) -> list[T]:
    """What is in the queue, at least one item."""
    found = [await items.get()]
    while not items.empty():
        found.append(items.get_nowait())
    return found


async def _off_loop(size: int, function: Callable[..., T], *arguments: Any) -> T:
    """The result of ``function``, which runs in a thread when ``size`` says it may take long."""
    if size <= _MAX_INLINE_SIZE:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)

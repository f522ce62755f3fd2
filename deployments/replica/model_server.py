"""One replica of one model: tokenizer, engine and local databases behind a streaming call."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ray import serve

from actors.logs import log_with_serve
from actors.mirror import CLOSING_S
from deployments.generation import TEMPLATE_VARIABLES, GenerationRequest, ModelInfo, Records
from deployments.metrics.ray_metrics import Reporter
from deployments.metrics.samples import Report
from deployments.off_loop import MAX_SHARED_SIZE, OffLoop
from deployments.parsers.reasoning_parsers import REASONING_PARSERS
from deployments.parsers.template_parsers import AUTO, reasoning_parser_of, tool_parser_of
from deployments.replica.heartbeat import AnswersCalls, beats_until
from deployments.replica.reasoning_reader import ReasoningReaders
from deployments.replica.record_builder import RecordBuilder
from deployments.replica.record_stream import RecordStreams
from deployments.replica.report import ReplicaMetrics
from deployments.replica.request_metrics import RequestMetrics
from deployments.replica.sequence_builder import SequenceBuilder
from deployments.replica.sharing import ClusterSharing
from deployments.replica.statistics import ChosenStatistics, locate_statistics
from deployments.replica.statistics_state import StatisticsState
from deployments.request_faults import streams_faults, tells_faults
from deployments.tracing import LAST_SPANS_S, Tracing
from hdserve.config import ModelConfig, ModelDatabaseConfig, TelemetryConfig
from hdserve.core import Sequence
from hdserve.engine.hardware.cpu_count import default_num_threads
from hdserve.engine.request_check import check_token_ids
from hdserve.errors import Overloaded

if TYPE_CHECKING:
    from hdserve.engine.async_engine import AsyncEngine
    from hdserve.engine.host import ModelHost

logger = logging.getLogger(__name__)

_MAX_SILENCE_S = 120.0
_COMPILING_SHARE = 4
"""Requests that wait for a new grammar may be one in this many of those that may be open: each
takes seconds at most, one after the other, while others are answered."""

_MAX_LARGE_TEXTS = 16
"""Half the slots of calls that generate nothing; the others are for health and metrics calls."""

_PUBLISHING_S = 2.0
_FAREWELL_S = 2.0
_FAREWELL_PAUSE_S = 0.2

MAX_LEAVING_S = _PUBLISHING_S + CLOSING_S + _FAREWELL_S + 2 * _FAREWELL_PAUSE_S + LAST_SPANS_S
"""The longest time a replica takes to end after its engine has failed.  Gateways keep trying for
longer."""


class ModelServer(AnswersCalls):
    """Hosts a model; Ray Serve runs ``num_replicas`` of it.

    A :class:`RequestError` reaches the gateway as a value (:mod:`deployments.request_faults`).

    Args:
        num_models: number of models served, including this one; they may share a node.
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
        log_with_serve()
        self._closing = ExitStack()
        self._config = config
        self._tracing = Tracing(telemetry, "hdserve-model")
        self._closing.callback(self._tracing.close)
        self._sharing: ClusterSharing | None = None
        self._closing.callback(self._close_sharing)
        self._replica = serve.get_replica_context().replica_id.unique_id
        num_threads = default_num_threads(config.num_cpus, num_models)
        self._host = self._load_model(database_config, num_threads)
        self._tokenizer = self._host.tokenizer
        self._model = self._host.model
        self._engine = self._make_engine()
        self._closing.callback(self._engine.close)
        self._engine.start()
        if database_config.is_enabled:
            sharing = ClusterSharing(self._host, self._engine, database_config, self._replica)
            sharing.start()
            self._sharing = sharing
        self._chosen = ChosenStatistics(
            self._host, self._engine, statistics_root, database_config.resources
        )
        self._closing.callback(self._chosen.close)
        self._chosen.start()
        self._requests = RequestMetrics()
        self._metrics = self._start_metrics()
        self._off_loop = OffLoop()
        max_num_compiling = max(1, self._config.engine.max_num_open // _COMPILING_SHARE)
        self._sequence_builder = SequenceBuilder(self._host, self._off_loop, max_num_compiling)
        self._num_large_texts = 0
        parser = REASONING_PARSERS.get(self._reasoning_parser() or "")
        self._reasoning = ReasoningReaders(parser, self._tokenizer)
        shows_rejected = self._config.show_rejected_drafts
        builder = RecordBuilder(self._tokenizer, self._replica, shows_rejected=shows_rejected)
        self._records = RecordStreams(self._engine, builder, self._requests, self._reasoning)

    def _load_model(self, database: ModelDatabaseConfig, num_threads: int) -> ModelHost:
        # Importing takes seconds and 250 MB; the process that builds the application does without.
        from hdserve.engine.host import ModelHost

        host = ModelHost(
            self._config,
            max_database_bytes=database.max_bytes,
            num_threads=num_threads,
            locate_statistics=partial(locate_statistics, resources=database.resources),
            on_output=self._publish,
            between_steps=lambda command: self._engine.call(command),
            is_server=True,
        )
        if self._config.num_gpus and host.device_name == "cpu":
            told = "%s: a GPU is reserved, but not used: `hdserve doctor` says why"
            logger.warning(told, self._config.name)
        return host

    def _make_engine(self) -> AsyncEngine:
        from hdserve.engine.async_engine import AsyncEngine

        max_num_open = self._config.engine.max_num_open
        return AsyncEngine(self._host.make_engine, max_num_open, on_failure=self._leave)

    def _start_metrics(self) -> ReplicaMetrics:
        metrics = ReplicaMetrics(
            self._replica, self._host, self._engine, self._requests, self._sharing, self._chosen
        )
        name, observations = self._config.name, self._requests.observations
        reporter = Reporter(name, {"model_name": name}, metrics.report, observations)
        self._closing.callback(reporter.close)
        reporter.start()
        return metrics

    def _publish(self, namespace: str, token_ids: list[int]) -> None:
        if self._sharing is not None:
            self._sharing.publish(namespace, token_ids)

    @streams_faults
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        """Answer ``request``: the deltas of all choices as they come, then a summary.

        Everything that has come since the last message is sent together: nothing waits, and the
        fewer messages this process can send, the more each carries.  In silences heartbeats are
        sent, if the request asks for them.

        Raises:
            RequestError: the request cannot be answered.
            Overloaded: as many sequences are waiting as may; another replica may answer.
            EngineGone: the engine had failed before; another replica may answer.
            EngineStopped: the engine has failed.
        """
        name = self._config.name
        with self._requests.refusals(), self._tracing.generation(request, name) as trace:
            arrived_s = time.monotonic()
            with self._engine.room(request.num_prompts, request.num_choices):
                building = asyncio.create_task(self._built(request))
                async with aclosing(beats_until(building, request.heartbeat_s)) as beats:
                    async for beat in beats:
                        yield beat
                request, sequences = building.result()
            if self._sharing is not None:
                self._sharing.use(request.namespace)
            answer = self._records.stream(request, sequences, trace, arrived_s)
            async with aclosing(answer) as found:
                async for records in found:
                    yield records

    async def _built(self, request: GenerationRequest) -> tuple[GenerationRequest, list[Sequence]]:
        size = request.num_body_bytes if self._reasoning.may_delay_grammar(request) else 0
        chat_text = self._sequence_builder.chat_text
        request = await self._off_loop(size, self._reasoning.prepared, request, chat_text)
        return request, await self._sequence_builder.build_off_loop(request)

    @tells_faults
    async def tokenize(self, text: str, adds_special_tokens: bool) -> list[int]:
        """Return the token ids of a text.

        Raises:
            Overloaded: too many large texts are waiting.
        """
        encode = partial(self._tokenizer.encode, adds_special_tokens=adds_special_tokens)
        with self._text(len(text)):
            return await self._off_loop(len(text), encode, text)

    @tells_faults
    async def tokenize_chat(self, request: GenerationRequest) -> list[int]:
        """Return the token ids of the conversation of ``request``.

        Raises:
            Overloaded: too many large texts are waiting.
        """
        encode = self._sequence_builder.chat_token_ids
        with self._text(request.num_body_bytes):
            return await self._off_loop(request.num_body_bytes, encode, request)

    @tells_faults
    async def token_texts(self, token_ids: list[int]) -> list[str]:
        """Return tokens in the vocabulary's notation.

        Raises:
            Overloaded: too many large texts are waiting.
        """
        with self._text(len(token_ids)):
            return await self._off_loop(len(token_ids), self._tokenizer.written, token_ids)

    @tells_faults
    async def detokenize(self, token_ids: list[int], param: str) -> str:
        """Return the text of token ids that were sent as the parameter ``param``.

        Raises:
            InvalidRequest: an id is not in the vocabulary.
            Overloaded: too many large texts are waiting.
        """
        with self._text(len(token_ids)):
            return await self._off_loop(len(token_ids), self._decoded, token_ids, param)

    def _decoded(self, token_ids: list[int], param: str) -> str:
        check_token_ids(param, token_ids, self._model.vocab_size)
        return self._tokenizer.decode(token_ids)

    @contextmanager
    def _text(self, size: int) -> Iterator[None]:
        """Reserve a place for a text of this size; large ones are processed one at a time."""
        is_large = size > MAX_SHARED_SIZE
        if is_large and self._num_large_texts >= _MAX_LARGE_TEXTS:
            raise Overloaded
        self._num_large_texts += is_large
        try:
            yield
        finally:
            self._num_large_texts -= is_large

    async def describe(self) -> ModelInfo:
        """Describe this replica's properties and state."""
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
            tool_parser=self._tool_parser(),
            template_variables=self._template_variables(),
        )

    def _reasoning_parser(self) -> str | None:
        name = self._config.reasoning_parser
        return reasoning_parser_of(self._tokenizer.template) if name == AUTO else name

    def _tool_parser(self) -> str | None:
        name = self._config.tool_parser
        return tool_parser_of(self._tokenizer.tools_template) if name == AUTO else name

    def _template_variables(self) -> tuple[str, ...]:
        has_variable = self._tokenizer.has_variable
        return tuple(
            name
            for name in TEMPLATE_VARIABLES
            if has_variable(name, has_tools=False) or has_variable(name, has_tools=True)
        )

    @tells_faults
    async def check_statistics(self, directory: str) -> None:
        """Check that the administrator may choose this statistics database, and that it is intact.

        Raises:
            InvalidRequest: the message says why not.
            Overloaded: another one is still being checked.
        """
        await self._off_loop.waiting(self._chosen.check, directory)

    async def statistics(self) -> StatisticsState:
        """Return which statistics database this replica drafts from."""
        return StatisticsState.of(self._replica, self._host.statistics)

    async def forget(self, namespace: str) -> None:
        """Drop what this replica generated in a namespace and what drafting learned from it; see
        :meth:`~hdserve.engine.host.ModelHost.forget`."""
        name = self._config.name
        await self._engine.ask(lambda engine: self._host.forget(engine, name, namespace))

    async def report(self) -> Report:
        """Return this replica's counts, for ``/metrics``."""
        return await self._metrics.report()

    def check_health(self) -> None:
        """Raise if the engine has failed or does not respond, so that Ray Serve replaces the
        replica."""
        self._engine.check(_MAX_SILENCE_S)

    def _leave(self) -> None:
        """End this process after its engine has failed, so that Ray Serve replaces it at once
        instead of after three failed health checks.  Called in the engine's thread."""
        if self._sharing is not None:
            self._sharing.close(_PUBLISHING_S)
        deadline_s = time.monotonic() + _FAREWELL_S
        while self._engine.num_open and time.monotonic() < deadline_s:
            time.sleep(_FAREWELL_PAUSE_S)
        time.sleep(_FAREWELL_PAUSE_S)  # the last errors are still being sent
        self._tracing.close()
        logger.error("the engine has failed: this replica ends and will be replaced")
        logging.shutdown()
        os._exit(1)

    def __del__(self) -> None:
        """Publish what is still queued; Ray Serve calls it once the last request has ended."""
        self._closing.close()

    def _close_sharing(self) -> None:
        if self._sharing is not None:
            self._sharing.close()

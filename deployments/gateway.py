"""The HTTP side: requests in, answers of the models out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import BackpressureConfig
from ray.serve.handle import DeploymentHandle

from actors.logs import log_with_serve
from deployments.deadline import Deadline
from deployments.generation import GenerationRequest, Records, Summary
from deployments.http.body_room import BodyRoom
from deployments.http.errors import RETRY_AFTER_S
from deployments.http.metrics import HttpMetrics
from deployments.metrics.poll import MetricsPoll
from deployments.metrics.ray_metrics import Reporter
from deployments.metrics.samples import Report
from deployments.model_infos import ModelInfos
from deployments.model_servers import ModelServers
from deployments.off_loop import OffLoop
from deployments.parsers.template_parsers import AUTO
from deployments.parsers.tool_parser import ToolParser
from deployments.parsers.tool_parsers import TOOL_PARSERS
from deployments.refusals import Refusals
from deployments.replica.statistics_state import StatisticsState
from deployments.runtime import actor_options
from deployments.tracing import Tracing
from hdserve.access import Access
from hdserve.config import ModelConfig, ServeConfig
from hdserve.config.deployed import GATEWAY_DEPLOYMENT
from hdserve.current_access import CurrentAccess
from hdserve.engine.request_check import check_num_sequences
from hdserve.errors import (
    EngineGone,
    ModelNotFound,
    Overloaded,
    RequestTimeout,
    ShuttingDown,
)

_RETRY_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""The pauses between tries; together they are longer than a replica takes to end after its engine
has failed (``MAX_LEAVING_S`` of :mod:`deployments.replica.model_server`)."""

_UNLIMITED = -1

DESCRIBE_TIMEOUT_S = 10.0
"""The time limit of calls that a replica answers at once: a slower one is hung, or does not
exist."""

_CHECK_TIMEOUT_S = 600.0
"""How long a replica may check a statistics database: enough to read some gigabytes from a slow
disk."""


class Gateway:
    """Finds the model of a request and passes its records on.

    Args:
        handles: of the model servers, by model name.
        access: who may use it, from the files as they were when the application was built; default:
            everybody.
        describe_timeout_s: how long a replica may take to describe itself.
    """

    def __init__(
        self,
        config: ServeConfig,
        handles: Mapping[str, DeploymentHandle[Any]],
        access: Access | None = None,
        describe_timeout_s: float = DESCRIBE_TIMEOUT_S,
    ) -> None:
        self._closing = ExitStack()
        self._describe_timeout_s = describe_timeout_s
        self.config = config
        self.access = CurrentAccess(access or Access())
        self._configs = {model.name: model for model in config.models}
        self._names = {
            name: model.name for model in config.models for name in (model.name, *model.aliases)
        }
        self.http_metrics = HttpMetrics(self._configs)
        self._servers = ModelServers(
            handles, config.gateway.max_replica_silence_s, self.http_metrics.fell_silent
        )
        self._refusals = Refusals()
        self.infos = ModelInfos(self._servers, self._check_open, describe_timeout_s)
        self.tracing = Tracing(config.telemetry, "hdserve-gateway")
        self._closing.callback(self.tracing.close)
        self.off_loop = OffLoop()
        self.body_room = BodyRoom(config.gateway.max_held_body_bytes)
        self._metrics_poll: MetricsPoll | None = None
        self.is_closed = False
        """Whether new requests are refused."""
        self._num_answering = 0

    def __del__(self) -> None:
        """End background work; Ray Serve calls it once the last request has ended."""
        self._closing.close()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the application; Ray Serve calls it once, in the replica."""
        from deployments.http.routes import build_api

        log_with_serve()
        # Here, because it waits for Ray Serve's controller, and later would block all streams.
        context = serve.get_replica_context()
        gateways = serve.get_deployment_handle(context.deployment, context.app_name)
        self._metrics_poll = MetricsPoll(self._servers.handles, gateways)
        api = build_api(self)
        reporter = Reporter("gateway", {}, self.report, self.http_metrics.observations)
        self._closing.callback(reporter.close)
        reporter.start()
        return api

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name a request may use, the first model first."""
        return tuple(self._names)

    def model(self, name: str) -> ModelConfig:
        """Return the configuration of a served model.

        Raises:
            ModelNotFound: the message lists the models.
        """
        if name not in self._names:
            known = ", ".join(self._names)
            raise ModelNotFound(
                f"the model {name[:100]!r} does not exist; there are: {known}", "model"
            )
        return self._configs[self._names[name]]

    def deadline(self, arrived_s: float | None = None) -> Deadline:
        """Return the deadline of a request that arrived at this time of the monotonic clock;
        default: now."""
        spent_s = 0.0 if arrived_s is None else time.monotonic() - arrived_s
        return Deadline(self.config.gateway.request_timeout_s, spent_s)

    async def close(self) -> None:
        """Refuse new requests from now on: the application is about to be removed."""
        self.is_closed = True

    async def num_answering(self) -> int:
        """Return how many answers have begun and not ended."""
        return self._num_answering

    def _check_open(self) -> None:
        """
        Raises:
            ShuttingDown: new requests are refused.
        """
        if self.is_closed:
            raise ShuttingDown("the server is shutting down; try again when it is back")

    async def generate(
        self, model: str, request: GenerationRequest, deadline: Deadline
    ) -> AsyncGenerator[Records, None]:
        """Yield the records of one answer, as many at a time as have arrived.  Closing the iterator
        aborts the request, and so does ``deadline``.

        A replica whose engine has failed answers faster than any other until it is gone, so
        requests it had not begun are retried.  Those it had begun are not: one may be why it
        failed, or fell silent.  A request that a full replica refuses is retried once, on any
        replica with room.

        Raises:
            HdserveError: the model server raised it, or there is none.
            EngineStopped: also if the replica that had begun was silent for too long.
            RequestTimeout: the deadline was reached.
            ShuttingDown: new requests are refused.
        """
        self._check_open()
        config, num_sequences = self.model(model), request.num_sequences
        max_num_open = config.engine.max_num_open
        check_num_sequences(request.num_prompts, request.num_choices, max_num_open)
        name = config.name
        self._refusals.check(name, num_sequences)
        pauses_s = iter(_RETRY_PAUSES_S)
        was_refused = has_begun = is_complete = False
        with self._answering():
            while True:
                async with aclosing(self._servers.generate(name, request, deadline)) as found:
                    try:
                        async for records in found:
                            if not has_begun:
                                self.infos.renew(config)
                            has_begun, is_complete = True, isinstance(records[-1], Summary)
                            yield records
                        return
                    except Overloaded as error:
                        if was_refused or has_begun:
                            self._refusals.note(name, num_sequences, error)
                            raise
                        was_refused, pause_s = True, 0.0
                    except EngineGone:
                        pause_s = next(pauses_s, -1.0)
                        if pause_s < 0 or has_begun:
                            raise
                    except (RequestTimeout, GeneratorExit):
                        if deadline.is_over and not is_complete:
                            self.http_metrics.timed_out(name)
                        raise
                request = replace(request, session_id="")
                await asyncio.sleep(min(pause_s, deadline.remaining_s))

    @contextmanager
    def _answering(self) -> Iterator[None]:
        self._num_answering += 1
        try:
            yield
        finally:
            self._num_answering -= 1

    async def tool_parser(
        self, model: str, deadline: Deadline, *, has_tools: bool
    ) -> type[ToolParser] | None:
        """Return the parser of the model's tool calls, if there may be any and they can be read."""
        config = self.model(model)
        if not has_tools or config.tool_parser is None:
            return None
        if config.tool_parser != AUTO:
            return TOOL_PARSERS[config.tool_parser]
        info = await self.infos.within(config, deadline)
        return TOOL_PARSERS.get(info.tool_parser or "")

    async def unread_by_template(
        self, model: str, deadline: Deadline, variables: Mapping[str, Collection[str]]
    ) -> frozenset[str]:
        """Return which parameters ask for what the model's chat template does not support.

        Args:
            variables: for each parameter the template variables that implement it; one is enough.
        """
        if not variables:
            return frozenset()
        info = await self.infos.within(self.model(model), deadline)
        known = set(info.template_variables)
        return frozenset(name for name in variables if not known.intersection(variables[name]))

    async def tokenize(self, model: str, text: str, adds_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = await self._ask(model, "tokenize", text, adds_special_tokens)
        return ids

    async def tokenize_chat(self, model: str, request: GenerationRequest) -> list[int]:
        """Return the token ids of the conversation of ``request``."""
        ids: list[int] = await self._ask(model, "tokenize_chat", request)
        return ids

    async def token_texts(self, model: str, token_ids: list[int]) -> list[str]:
        """Return tokens in the model vocabulary's own notation."""
        texts: list[str] = await self._ask(model, "token_texts", token_ids)
        return texts

    async def detokenize(self, model: str, token_ids: list[int], param: str) -> str:
        """Return the text of token ids that were sent as the parameter ``param``."""
        text: str = await self._ask(model, "detokenize", token_ids, param)
        return text

    async def statistics(self, model: str) -> list[StatisticsState]:
        """Return the statistics database that each replica of the model drafts from; none if the
        model may have no replica and has none."""
        config = self.model(model)
        return await self._servers.call_all(
            config.name, self._describe_timeout_s, "statistics", may_have_none=config.may_sleep
        )

    async def check_statistics(self, model: str, directory: str) -> None:
        """Check that every replica of the model can draft from the database in ``directory``; if
        there is none, one is started.

        Raises:
            InvalidRequest: a replica says why it cannot.
        """
        config = self.model(model)
        await self.infos.ask(config)
        await self._servers.call_all(config.name, _CHECK_TIMEOUT_S, "check_statistics", directory)

    async def forget(self, model: str, namespace: str) -> None:
        """Make all replicas of the model forget a namespace, as those must be told to that do not
        share what they generate.

        Raises:
            EngineStopped: a replica has not answered; or there is none, though there has to be.
        """
        config = self.model(model)
        await self._servers.call_all(
            config.name,
            self._describe_timeout_s,
            "forget",
            namespace,
            may_have_none=config.may_sleep,
        )

    async def unready_models(self) -> list[str]:
        """Return the models whose replicas do not answer, and have not answered a moment ago,
        except models that may have no replica."""
        models = [model for model in self.config.models if not model.may_sleep]
        answers = await asyncio.gather(*map(self.infos.is_ready, models))
        return [model.name for model, ready in zip(models, answers, strict=True) if not ready]

    async def report(self) -> Report:
        """Return what this gateway counted."""
        replica = serve.get_replica_context().replica_id.unique_id
        return Report(replica, self.http_metrics.samples())

    async def metrics_text(self) -> bytes:
        """Return the reports of all replicas and gateways as Prometheus text."""
        assert self._metrics_poll is not None, "it was made with the application"
        return await self._metrics_poll.text()

    async def _ask(self, model: str, method: str, *arguments: Any) -> Any:
        self._check_open()
        return await self._servers.call(self.model(model).name, method, *arguments)


def gateway_deployment(
    config: ServeConfig, models: Mapping[str, serve.Application], access: Access
) -> serve.Application:
    """Return the Serve application of the whole system; its ingress is the gateway."""
    deploy = serve.deployment(
        name=GATEWAY_DEPLOYMENT,
        num_replicas=config.gateway.num_replicas,
        max_ongoing_requests=config.gateway.max_ongoing_requests,
        max_queued_requests=config.gateway.max_queued_requests or _UNLIMITED,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        ray_actor_options=actor_options(
            config.gateway.num_cpus,
            config.gateway.max_body_bytes,
            resources=dict(config.gateway.resources),
        ),
    )
    return deploy(serve.ingress()(Gateway)).bind(config, dict(models), access)

"""What lies between a client and an engine costs.

    python -m benchmarks.gateway_overhead [--json OUT]

Two figures of one gateway, one replica and this machine.  *First token*: one request at a time to
a bundled model; what the client waited less what the engine took, which the answer says.
*Streaming*: many streams at once from a stub in place of the engine, which gives every sequence two
or three tokens a step, 2.5 on average, faster than they can be carried away; everything else, the
replica's event loop, Ray Serve, gateway, proxy and HTTP, is what serves.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from ray import serve
from rich.console import Console

from benchmarks.server_processes import cpu_s, server_processes
from deployments.gateway import gateway_deployment
from deployments.model_deployment import model_deployment
from deployments.replica.model_server import ModelServer
from deployments.runtime import actor_options
from hdserve.access import Access
from hdserve.bench.environment import commit, cpu_name
from hdserve.bench.openai_client import OpenAIClient
from hdserve.bench.request_record import Outcome
from hdserve.config import (
    GatewayConfig,
    ModelConfig,
    ModelDatabaseConfig,
    TelemetryConfig,
    parse_config,
)
from hdserve.core import FinishReason, Sequence, Source, StepOutput
from hdserve.engine.async_engine import AsyncEngine
from hdserve.engine.stats import EngineStats

REAL, STUB = "hdserve-mini", "stub"
TOKENS = (2, 3)
"""Tokens of a sequence in one step and in the next."""


class StubEngine:
    """Gives every sequence its tokens, without a model."""

    max_total_tokens = 1_000_000

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[str, Sequence] = {}
        self.stats = EngineStats()

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add(self, seq: Sequence) -> None:
        seq.max_total_tokens = len(seq.token_ids) + (seq.params.max_tokens or 16)
        seq.admitted_s = time.monotonic()
        self._running[seq.request_id] = seq

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def step(self) -> list[StepOutput]:
        time.sleep(self._step_s)
        self.stats.num_steps += 1
        return [self._output(seq) for seq in list(self._running.values())]

    def _output(self, seq: Sequence) -> StepOutput:
        num_tokens = min(TOKENS[self.stats.num_steps % 2], seq.num_remaining_tokens)
        seq.token_ids += [7] * num_tokens
        if seq.num_remaining_tokens == 0:
            seq.finish_reason = FinishReason.LENGTH
            self.abort(seq.request_id)
        return StepOutput(
            seq,
            token_ids=(7,) * num_tokens,
            sources=(Source.MODEL,) * (num_tokens - 1) + (Source.PLAIN,),
            texts=(" word",) * num_tokens,
            finish_reason=seq.finish_reason,
        )


def stub_deployment(config: ModelConfig, step_s: float) -> serve.Application:
    """Return the model server with a stub for its engine."""

    class StubServer(ModelServer):
        def __init__(self) -> None:
            database = ModelDatabaseConfig(is_enabled=False)
            super().__init__(config, database, 1, TelemetryConfig())
            self._engine.close()
            engine: Any = StubEngine(step_s)
            self._engine = AsyncEngine(lambda: engine, 10_000)
            self._engine.start()
            self._records = self._record_streams()

    deploy = serve.deployment(
        name="model-stub",
        max_ongoing_requests=10_000,
        ray_actor_options=actor_options(0, GatewayConfig().max_body_bytes),
    )
    return deploy(StubServer).bind()


async def first_token_ms(base_url: str, model: str, num_requests: int) -> list[float]:
    """Return, per request, how much longer than the engine the client waited."""
    body = {"model": model, "max_tokens": 4, "temperature": 0.0}
    waits_ms = []
    async with OpenAIClient(base_url, "chat", body) as client:
        for number in range(num_requests + 5):
            record = await client.ask("first", f"Say the number {number}.")
            assert record.outcome is Outcome.COMPLETED, record.error
            assert record.engine_ttft_s is not None
            waits_ms.append(1000 * (record.ttft_s - record.engine_ttft_s))
            await asyncio.sleep(0.02)
    return waits_ms[5:]


async def tokens_per_s(base_url: str, num_streams: int, max_tokens: int) -> tuple[float, int]:
    """Return the tokens a second over all streams, and the chunks that carried them."""
    body = {"model": STUB, "max_tokens": max_tokens}
    async with OpenAIClient(base_url, "chat", body) as client:
        started_s = time.monotonic()
        records = await asyncio.gather(
            *(client.ask("stream", "Go on.") for _ in range(num_streams))
        )
        elapsed_s = time.monotonic() - started_s
    for record in records:
        assert record.outcome is Outcome.COMPLETED, record.error
        assert record.num_output_tokens == max_tokens
        assert record.text == " word" * max_tokens
    return num_streams * max_tokens / elapsed_s, sum(len(r.chunk_times_s) for r in records)


class CpuClock:
    """Processor time of this process and of those that serve, since it was made."""

    def __init__(self) -> None:
        self._pids = {item.name: item.pid for item in server_processes(os.getpid())}
        self._pids["client"] = os.getpid()
        self._before_s = {name: cpu_s(pid) for name, pid in self._pids.items()}

    def elapsed_s(self) -> dict[str, float]:
        return {name: cpu_s(pid) - self._before_s[name] for name, pid in self._pids.items()}


def start(port: int, step_s: float) -> str:
    """Deploy both models behind one gateway."""
    engine = {"compile": False}  # would take its time from what is measured
    reserved = {"num_cpus": 0, "num_gpus": 0}
    models = [{"name": name, "model": REAL, **reserved, "engine": engine} for name in (REAL, STUB)]
    config = parse_config(
        {
            "models": models,
            "gateway": {"num_cpus": 0, "max_ongoing_requests": 10_000},
            "model_database": {"is_enabled": False},
        }
    )
    real, stub = config.models
    applications = {
        REAL: model_deployment(real, config),
        STUB: stub_deployment(stub, step_s),
    }
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(gateway_deployment(config, applications, Access()), name="overhead")
    return f"http://127.0.0.1:{port}"


def main(
    requests: Annotated[int, typer.Option(help="For the first token.", min=1)] = 200,
    streams: Annotated[int, typer.Option(help="At a time.", min=1)] = 32,
    max_tokens: Annotated[int, typer.Option(help="Of a stream.", min=1)] = 500,
    rounds: Annotated[int, typer.Option(help="Of streaming.", min=1)] = 5,
    step_ms: Annotated[float, typer.Option(help="A step of the stub.", min=0)] = 5.0,
    port: Annotated[int, typer.Option()] = 8110,
    environment: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for all processes, as Ray Serve reads.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and print."""
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.update(pair.split("=", 1) for pair in environment or ())
    base_url = start(port, step_ms / 1000)
    try:
        waits_ms = sorted(asyncio.run(first_token_ms(base_url, REAL, requests)))
        rates, num_chunks, clock = [], 0, CpuClock()
        for _ in range(rounds):
            rate, num_chunks = asyncio.run(tokens_per_s(base_url, streams, max_tokens))
            rates.append(rate)
        used_s = clock.elapsed_s()
    finally:
        serve.shutdown()
        ray.shutdown()
    result = {
        "first_token_over_engine_ms": {
            "p50": statistics.median(waits_ms),
            "p90": waits_ms[int(0.9 * len(waits_ms))],
            "p99": waits_ms[int(0.99 * len(waits_ms))],
            "num_requests": requests,
        },
        "streaming": {
            "tokens_per_s": statistics.median(rates),
            "rounds": rates,
            "streams": streams,
            "tokens_per_step": sum(TOKENS) / len(TOKENS),
            "offered_tokens_per_s": streams * sum(TOKENS) / len(TOKENS) / (step_ms / 1000),
            "tokens_per_chunk": streams * max_tokens / num_chunks,
            "cpu_us_per_token": {
                name: 1e6 * used / (rounds * streams * max_tokens) for name, used in used_s.items()
            },
        },
        "environment": environment or [],
        "load_average": os.getloadavg()[0],
        "commit": commit(),
        "hardware": cpu_name(),
    }
    Console().print_json(json.dumps(result))
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

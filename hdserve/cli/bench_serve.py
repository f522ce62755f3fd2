"""``hdserve bench serve``: load on a running server, and what its clients saw."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hdserve.bench.environment import commit
from hdserve.bench.load import Load, LoadPlan, run_load
from hdserve.bench.openai_client import Api, OpenAIClient
from hdserve.bench.request_record import Outcome, RequestRecord
from hdserve.bench.serve import as_result, details
from hdserve.bench.spec_decode import DraftTotals, read_draft_totals
from hdserve.cli.bench_serve_results import WIDTH, LoadResults, load_table
from hdserve.cli.interruption import EXIT_INTERRUPTED, how_to_go_on, interruptible
from hdserve.cli.json_option import JobJson, JsonOutput
from hdserve.cli.number_list import numbers
from hdserve.cli.prompts_option import Prompts
from hdserve.errors import ConfigError
from hdserve.journal import Journal, file_digest
from hdserve.prompts import PromptRow, read_prompts

GOODPUT_NAMES = ("ttft", "tpot", "e2el")
_METRICS_AGE_S = 1.1
"""A gateway may answer ``/metrics`` with what it heard up to a second ago."""


def serve(
    base_url: Annotated[
        str, typer.Option(help="Of any server of the OpenAI API: http://localhost:8000.")
    ],
    prompts: Prompts,
    model: Annotated[
        str | None, typer.Option(help="Default: the first of the server's /v1/models.")
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Most requests at a time: 1,8,32 measures each.")
    ] = "1,8,32,128",
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Requests per concurrency; default: every prompt once.", min=1),
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Mean arrivals a second; default: as concurrency allows.")
    ] = float("inf"),
    burstiness: Annotated[
        float, typer.Option(help="Of the arrivals: 1 is a Poisson process, less is burstier.")
    ] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per answer.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Every answer has just `--max-tokens`.")] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals, order and sampling.")] = 0,
    api: Annotated[str, typer.Option(help="Which route: chat or completions.")] = "chat",
    api_key: Annotated[str | None, typer.Option(help="Sent as bearer token.")] = None,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object of further fields of every request.")
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(help="What a good request keeps, in ms: `ttft:500,tpot:50,e2el:9000`."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Most seconds of a request.", min=1)] = 600.0,
    label: Annotated[str | None, typer.Option(help="Written into every result.")] = None,
    detailed: Annotated[bool, typer.Option(help="Write every request to the JSON, too.")] = False,
    json_path: JobJson = None,
) -> None:
    """Send prompts to a running server and report latencies and throughput.

    The keys of the results are those of `vllm bench serve`. Requests refused with 429 are counted
    apart from those that failed. Ctrl-C ends it, and what was measured until then is written. When
    the same command is run again, it goes on with the first concurrency it has not ended, from that
    one's first request. Exits with 1 when a request failed.
    """
    if api not in get_args(Api):
        raise ConfigError(f"--api is one of {', '.join(get_args(Api))}")
    if request_rate <= 0 or burstiness <= 0:
        raise ConfigError("--request-rate and --burstiness must be above 0")
    length = "max_completion_tokens" if api == "chat" else "max_tokens"
    body = {length: max_tokens, "temperature": temperature, **_json_object(extra_body)}
    if ignore_eos:
        body["ignore_eos"] = True
    output = JsonOutput(json_path)
    rows = read_prompts(prompts)
    if api == "completions" and any(row.conversation for row in rows):
        raise ConfigError(f"{prompts}: rows with `messages` can be asked with --api chat alone")
    num_requests = num_prompts or len(rows)
    plans = [
        LoadPlan(places, num_requests, request_rate, burstiness, seed)
        for places in numbers("--concurrency", concurrency)
    ]
    bounds = _goodput(goodput)
    target = _Target(base_url, cast("Api", api), model, body, api_key, timeout_s)
    settings = {
        "endpoint_type": "openai-chat" if api == "chat" else "openai",
        "label": label,
        "base_url": base_url,
        "prompts": prompts.name,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "extra_body": _json_object(extra_body),
        "commit": commit(),
    }
    unshown = {
        "model": model,
        "digest": file_digest(prompts),
        "plans": [asdict(plan) for plan in plans],
        "body": body,
        "goodput": bounds,
        "timeout_s": timeout_s,
        "detailed": detailed,
    }
    journal = Journal(output.file, settings | unshown)
    begun = {"date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), **settings}

    def result(load: Load, model_name: str, drafts: DraftTotals | None) -> dict[str, Any]:
        row = {**begun, "model_id": model_name, **as_result(load, bounds)}
        row |= drafts.as_result() if drafts else {}
        return row | (details(load.records) if detailed else {})

    results = LoadResults(journal, output, result)
    waiting = plans[results.num_restored :]
    if waiting:
        with interruptible(how_to_go_on(output.file)):
            asyncio.run(_measure(target, rows, waiting, results.keep))
    if output.has_text:
        Console(width=WIDTH, markup=False).print(load_table(results.rows))
    results.write()
    if results.is_interrupted:
        told = f"interrupted; {how_to_go_on(output.file)}"
        Console(stderr=True, highlight=False, soft_wrap=True).print(told)
        raise typer.Exit(EXIT_INTERRUPTED)
    journal.finish()
    if any(row["failed"] for row in results.rows):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Target:
    """The server, and what is asked of it."""

    base_url: str
    api: Api
    model: str | None
    body: Mapping[str, Any]
    api_key: str | None
    timeout_s: float


async def _measure(
    target: _Target,
    rows: Sequence[PromptRow],
    plans: Sequence[LoadPlan],
    keep: Callable[[Load, str, DraftTotals | None], None],
) -> None:
    """Run the plans one after the other until Ctrl-C.

    Args:
        keep: told what came of each, with the model and what the server drafted meanwhile.

    Raises:
        KeyboardInterrupt: at Ctrl-C before the first load.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    model = target.model or await _first_model(target)
    client = OpenAIClient(
        target.base_url,
        target.api,
        {"model": model, **target.body},
        api_key=target.api_key,
        timeout_s=target.timeout_s,
    )
    async with client:
        await _check(client, rows[0])
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        before = await _draft_totals(client, model)
        for plan in plans:
            with _progress(plan) as progress:
                load = await run_load(client, rows, plan, stop=stop, progress=progress)
            after = await _draft_totals(client, model) if before else None
            keep(load, model, after.since(before) if after and before else None)
            before = after
            if stop.is_set():
                return


async def _first_model(target: _Target) -> str:
    client = OpenAIClient(target.base_url, target.api, {}, api_key=target.api_key)
    async with client:
        found = await client.first_model()
        answers = found is not None or await client.get_text("/v1/models") is not None
    url = f"{target.base_url}/v1/models"
    if not answers:
        raise ConfigError(f"{url} cannot be read: does the server run, and does it want --api-key?")
    if found is None:
        raise ConfigError(f"{url} names no model; say which with --model")
    return found


async def _check(client: OpenAIClient, row: PromptRow) -> None:
    """Have one request answered, which also warms the server.

    Raises:
        ConfigError: it failed; so would all.
    """
    record = await client.ask(row.name, row.conversation or row.text)
    if record.outcome is Outcome.FAILED:
        raise ConfigError(f"the first request failed: {record.error}")


async def _draft_totals(client: OpenAIClient, model: str) -> DraftTotals | None:
    await asyncio.sleep(_METRICS_AGE_S)
    text = await client.get_text("/metrics")
    try:
        return None if text is None else read_draft_totals(text, model)
    except ValueError:  # another text than that of Prometheus
        return None


@contextmanager
def _progress(plan: LoadPlan) -> Iterator[Callable[[RequestRecord], None]]:
    """Shows how many requests have ended, and how."""
    columns = (
        TextColumn("concurrency {task.fields[places]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[outcomes]}"),
        TimeElapsedColumn(),
    )
    counts: Counter[Outcome | None] = Counter()
    num_tokens = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=plan.num_prompts, places=plan.concurrency, outcomes="")

        def note(record: RequestRecord) -> None:
            nonlocal num_tokens
            counts[record.outcome] += 1
            num_tokens += record.num_output_tokens
            shown = f"{num_tokens} tokens, {counts[Outcome.REJECTED]} rejected"
            bar.update(task, advance=1, outcomes=f"{shown}, {counts[Outcome.FAILED]} failed")

        yield note


def _goodput(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    try:
        pairs = [part.split(":") for part in text.split(",")]
        bounds = {name: float(bound) for name, bound in pairs}
    except ValueError:
        bounds = {"": 0.0}
    if not bounds.keys() <= set(GOODPUT_NAMES):
        raise ConfigError("--goodput is like ttft:500,tpot:50,e2el:9000, in milliseconds")
    return bounds


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return found

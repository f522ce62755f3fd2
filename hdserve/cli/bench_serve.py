"""``hdserve bench serve``: load on a running server, and what its clients saw."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

from hdserve.bench.environment import commit
from hdserve.bench.load import Load, LoadPlan
from hdserve.bench.openai_client import Api
from hdserve.bench.serve import as_result, details
from hdserve.bench.spec_decode import DraftTotals
from hdserve.cli import EXIT_INTERRUPTED
from hdserve.cli.bench_serve_job import Target, measure
from hdserve.cli.bench_serve_results import WIDTH, LoadResults, load_table
from hdserve.cli.file_names import shown_name
from hdserve.cli.interruption import how_to_go_on, interruptible
from hdserve.cli.json_option import JobJson, JsonOutput
from hdserve.cli.options import Prompts, Temperature, numbers, takes
from hdserve.errors import ConfigError
from hdserve.journal import Journal
from hdserve.prompts import PromptRow, read_prompts, rows_digest

GOODPUT_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """The server, what is asked of it and how often.

    Raises:
        ConfigError: an option is out of range.
    """

    base_url: Annotated[
        str, typer.Option(help="Of any server of the OpenAI API: http://localhost:8000.")
    ]
    prompts: Prompts
    model: Annotated[
        str | None, typer.Option(help="Default: the first of the server's /v1/models.")
    ] = None
    concurrency: Annotated[
        str, typer.Option(help="Most requests at a time: 1,8,32 measures each.")
    ] = "1,8,32,128"
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Requests per concurrency; default: one for each prompt.", min=1),
    ] = None
    num_warmups: Annotated[
        int, typer.Option(help="Requests before the first that is measured.", min=0)
    ] = 0
    request_rate: Annotated[
        float, typer.Option(help="Mean arrivals a second; default: as concurrency allows.")
    ] = float("inf")
    burstiness: Annotated[
        float, typer.Option(help="Of the arrivals: 1 is a Poisson process, less is burstier.")
    ] = 1.0
    max_tokens: Annotated[int, typer.Option(help="Most tokens per answer.", min=1)] = 128
    temperature: Temperature = 0.0
    ignore_eos: Annotated[bool, typer.Option(help="Every answer has just `--max-tokens`.")] = False
    seed: Annotated[int, typer.Option(help="Of arrivals, order and sampling.")] = 0
    api: Annotated[str, typer.Option(help="Which route: chat or completions.")] = "chat"
    api_key: Annotated[str | None, typer.Option(help="Sent as bearer token.")] = None
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object of further fields of every request.")
    ] = None
    goodput: Annotated[
        str | None,
        typer.Option(help="What a good request keeps, in ms: `ttft:500,tpot:50,e2el:9000`."),
    ] = None
    timeout_s: Annotated[float, typer.Option(help="Most seconds of a request.", min=1)] = 600.0
    label: Annotated[str | None, typer.Option(help="Written into every result.")] = None
    detailed: Annotated[bool, typer.Option(help="Write every request to the JSON, too.")] = False
    json_path: JobJson = None

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError("--base-url begins with http:// or https://")
        if self.api not in get_args(Api):
            raise ConfigError(f"--api is one of {', '.join(get_args(Api))}")
        if not self.request_rate > 0 or not 0 < self.burstiness < math.inf:
            raise ConfigError(
                "--request-rate and --burstiness must be numbers above 0, and --burstiness finite"
            )
        if not self.timeout_s < math.inf:
            raise ConfigError("--timeout-s must be finite")
        if not (self.api_key or "").isprintable():
            raise ConfigError("--api-key has a line end, or another character that no key has")

    @property
    def target(self) -> Target:
        """The server, and the common part of all requests.

        Raises:
            ConfigError: ``extra_body`` is not a JSON object.
        """
        length = "max_completion_tokens" if self.api == "chat" else "max_tokens"
        body = {length: self.max_tokens, "temperature": self.temperature, **self.extra_fields}
        if self.ignore_eos:
            body["ignore_eos"] = True
        api = cast("Api", self.api)
        return Target(self.base_url, api, self.model, body, length, self.api_key, self.timeout_s)

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The fields in ``extra_body``.

        Raises:
            ConfigError: it is not a JSON object.
        """
        try:
            found = json.loads(self.extra_body) if self.extra_body else {}
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ConfigError("--extra-body must be a JSON object")
        return found

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds in ``goodput``, in milliseconds.

        Raises:
            ConfigError: it names something that is not measured, or bounds are not numbers.
        """
        if self.goodput is None:
            return {}
        try:
            pairs = [part.split(":") for part in self.goodput.split(",")]
            bounds = {name: float(bound) for name, bound in pairs}
        except ValueError:
            bounds = {"": 0.0}
        if not bounds.keys() <= set(GOODPUT_NAMES):
            raise ConfigError("--goodput is like ttft:500,tpot:50,e2el:9000, in milliseconds")
        if not all(0 <= bound < math.inf for bound in bounds.values()):
            raise ConfigError(f"--goodput {self.goodput}: bounds are finite and not below 0")
        return bounds

    def plans(self, num_rows: int) -> list[LoadPlan]:
        """Return a load for each number of ``concurrency``.

        Args:
            num_rows: prompts that there are.

        Raises:
            ConfigError: ``concurrency`` is not a list of numbers.
        """
        num = self.num_prompts or num_rows
        return [
            LoadPlan(places, num, self.request_rate, self.burstiness, self.seed, num_before=k * num)
            for k, places in enumerate(numbers("--concurrency", self.concurrency))
        ]


@takes(LoadOptions)
def serve(options: LoadOptions) -> None:
    """Send prompts to a running server and report latencies and throughput.

    The keys of the results are those of `vllm bench serve`. Requests refused with 429 are counted
    apart from those that failed. Each concurrency begins with the prompts that the one before has
    not asked; where prompts come again, a server may draft from their answers, and the results
    count such requests. Ctrl-C ends it, and what was measured until then is written. When the same
    command is run again, it goes on with the first concurrency it has not ended, from that one's
    first request. Exits with 1 when a request failed.
    """
    output = JsonOutput(options.json_path)
    rows = _rows(options)
    plans = options.plans(len(rows))
    _warn(plans)
    bounds, target = options.bounds, options.target
    settings = _settings(options)
    journal = Journal(output.lasting_file, settings | _unshown(options, rows, plans))
    begun = {"date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), **settings}

    def result(load: Load, model_name: str, drafts: DraftTotals | None) -> dict[str, Any]:
        row = {**begun, "model_id": model_name, **as_result(load, bounds)}
        row |= drafts.as_result() if drafts else {}
        return row | (details(load.records) if options.detailed else {})

    results = LoadResults(journal, output, result)
    waiting = plans[results.num_restored :]
    if waiting:
        waiting[0] = replace(waiting[0], num_asked=results.num_asked)
        with interruptible(how_to_go_on(output.lasting_file)):
            num_warmups = options.num_warmups
            asyncio.run(measure(target, rows, waiting, results.keep, num_warmups=num_warmups))
    if output.has_text:
        Console(width=WIDTH, markup=False).print(load_table(results.rows))
    results.write()
    _tell_failures(results.rows)
    _tell_uncounted(results.rows)
    if results.is_interrupted or len(results.rows) < len(plans):
        typer.echo(f"interrupted; {how_to_go_on(output.lasting_file)}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    journal.finish()
    if any(row["failed"] or not row["completed"] for row in results.rows):
        raise typer.Exit(1)


def _warn(plans: Sequence[LoadPlan]) -> None:
    """Warn of each concurrency that is never reached."""
    num_prompts = plans[0].num_prompts
    for plan in plans:
        if num_prompts < plan.concurrency:
            typer.echo(
                f"--concurrency {plan.concurrency} is never reached, only {num_prompts}, the "
                "number of requests; raise --num-prompts to send more",
                err=True,
            )


def _tell_failures(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        for reason, number in row["failures"].items():
            told = f"{number} failed at concurrency {row['max_concurrency']}: {reason}"
            typer.echo(told, err=True)
        if not row["completed"]:
            told = f"none completed at concurrency {row['max_concurrency']}: nothing was measured"
            reason = next(iter(row["rejections"]), None)
            typer.echo(f"{told}; rejected: {reason}" if reason else told, err=True)


def _tell_uncounted(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say for how many answers the server gave no numbers of tokens."""
    for row in rows:
        if row["num_without_usage"]:
            typer.echo(
                f"{row['num_without_usage']} answered without usage at concurrency "
                f"{row['max_concurrency']}: their chunks are counted as tokens, and their prompts "
                "are not counted",
                err=True,
            )


def _rows(options: LoadOptions) -> list[PromptRow]:
    rows = read_prompts(options.prompts)
    if options.api == "completions" and any(row.conversation for row in rows):
        told = "rows with `messages` need --api chat"
        raise ConfigError(f"{options.prompts}: {told}")
    return rows


def _settings(options: LoadOptions) -> dict[str, Any]:
    """Return those settings that are written with the results."""
    return {
        "endpoint_type": "openai-chat" if options.api == "chat" else "openai",
        "label": options.label,
        "base_url": options.base_url,
        "prompts": shown_name(options.prompts),
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "num_warmups": options.num_warmups,
        "extra_body": options.extra_fields,
        "commit": commit(),
    }


def _unshown(
    options: LoadOptions, rows: Sequence[PromptRow], plans: Sequence[LoadPlan]
) -> dict[str, Any]:
    """Return the other settings that the results depend on."""
    return {
        "model": options.model,
        "digest": rows_digest(rows),
        "plans": [asdict(plan) for plan in plans],
        "body": options.target.body,
        "goodput": options.bounds,
        "timeout_s": options.timeout_s,
        "detailed": options.detailed,
    }

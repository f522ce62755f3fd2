"""The work of ``hdserve bench serve``: load on a server, with progress bars."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn

from hdserve.bench.load import Load, LoadPlan, run_load, until_stopped
from hdserve.bench.openai_client import Api, OpenAIClient
from hdserve.bench.request_record import Outcome, RequestRecord
from hdserve.bench.spec_decode import DraftTotals, read_draft_totals
from hdserve.cli.progress import shown_bars
from hdserve.errors import ConfigError
from hdserve.prompts import PromptRow

CHECK_TEXT = "Is anybody there?"

_WRONG_VALUE = {400, 422}
"""What servers answer where a value of the request is not allowed."""

_METRICS_AGE_S = 1.1
"""A gateway may answer ``/metrics`` with values that are up to a second old."""

_METRICS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and what is asked of it.

    Attributes:
        length_field: the field of ``body`` for the most tokens of an answer.
    """

    base_url: str
    api: Api
    model: str | None
    body: Mapping[str, Any]
    length_field: str
    api_key: str | None
    timeout_s: float


async def measure(
    target: Target,
    rows: Sequence[PromptRow],
    plans: Sequence[LoadPlan],
    keep: Callable[[Load, str, DraftTotals | None], None],
    *,
    num_warmups: int = 0,
) -> None:
    """Run the plans one after the other until Ctrl-C.

    Args:
        num_warmups: requests that are sent first, and are not part of any result.
        keep: called with the result of each, the model, and what the server drafted meanwhile, if
            known before Ctrl-C.

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
        await _check(client, target)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        if num_warmups:
            await _warm_up(client, num_warmups, max(plan.concurrency for plan in plans), stop)
        names = await until_stopped(stop, client.names_of(model)) or {model}
        before = await until_stopped(stop, _draft_totals(client, names))
        for plan in () if stop.is_set() else plans:
            with _progress(plan, f"concurrency {plan.concurrency}") as progress:
                load = await run_load(client, rows, plan, stop=stop, progress=progress)
            after = await until_stopped(stop, _draft_totals(client, names))
            keep(load, model, after.since(before) if after and before else None)
            before = after
            if stop.is_set():
                return


async def _first_model(target: Target) -> str:
    client = OpenAIClient(target.base_url, target.api, {}, api_key=target.api_key)
    async with client:
        found = await client.first_model()
        fault = "" if found is not None else await client.fault("/v1/models")
    url = f"{target.base_url}/v1/models"
    if fault:
        raise ConfigError(f"{url} cannot be read: {fault}")
    if found is None:
        raise ConfigError(f"{url} names no model; say which with --model")
    return found


async def _check(client: OpenAIClient, target: Target) -> None:
    """Get an answer to one very short request, or to one of full length if the server refuses
    that, with a text that no load uses, since a server may draft from answers and caches prompts.

    Raises:
        ConfigError: it failed, as all others would.
    """
    length = {} if "min_tokens" in target.body else {target.length_field: 1}
    record = await client.ask("check", CHECK_TEXT, **length)
    if length and record.status in _WRONG_VALUE:
        record = await client.ask("check", CHECK_TEXT)
    if record.outcome is Outcome.FAILED:
        raise ConfigError(f"the first request failed: {record.error}")


async def _warm_up(
    client: OpenAIClient, num_warmups: int, concurrency: int, stop: asyncio.Event
) -> None:
    """Send a text that no load uses, as often and at as many a time."""
    plan = LoadPlan(concurrency, num_warmups)
    with _progress(plan, "warming up") as progress:
        row = PromptRow("warm-up", "all", CHECK_TEXT)
        await run_load(client, [row], plan, stop=stop, progress=progress)


async def _draft_totals(client: OpenAIClient, names: Collection[str]) -> DraftTotals | None:
    await asyncio.sleep(_METRICS_AGE_S)
    text = await client.get_text("/metrics", _METRICS_TIMEOUT_S)
    try:
        return None if text is None else read_draft_totals(text, names)
    except ValueError:  # not in the Prometheus format
        return None


@contextmanager
def _progress(plan: LoadPlan, doing: str) -> Iterator[Callable[[RequestRecord], None]]:
    """Show how many requests have ended, and how."""
    columns = (
        MofNCompleteColumn(),
        TextColumn("{task.fields[outcomes]}"),
        TimeElapsedColumn(),
    )
    counts: Counter[Outcome | None] = Counter()
    num_tokens = 0
    with shown_bars(*columns) as bar:
        task = bar.add_task(doing, total=plan.num_prompts, outcomes="")

        def note(record: RequestRecord) -> None:
            nonlocal num_tokens
            counts[record.outcome] += 1
            num_tokens += record.num_output_tokens
            shown = f"{num_tokens} tokens, {counts[Outcome.REJECTED]} rejected"
            bar.update(task, advance=1, outcomes=f"{shown}, {counts[Outcome.FAILED]} failed")

        yield note

"""Many concurrent streams for a while: is every answer whole and right, and is all given back?

    python -m benchmarks.serving_load --prompts prompts.jsonl [--streams 500] [--json OUT]

Starts ``hdserve serve`` with one model in exact float32.  Each prompt is first answered alone,
greedy and sampled; then the streams ask the same again and again, and each answer must equal the
one given alone.  A request may instead be refused with 429, which waits as it is told.  Some
clients hang up in the middle.  Memory of every process is taken once a second.  At the end nothing
may run, wait, or be kept by a drafter, and the server's counts must be those of the clients.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.server import Server
from benchmarks.server_processes import MemoryLog, server_processes
from hdserve.bench.environment import commit, cpu_name
from hdserve.bench.openai_client import OpenAIClient
from hdserve.bench.request_record import Outcome, RequestRecord
from hdserve.prompts import read_prompts

SETTINGS: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
MUST_BE_ZERO = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "hdserve_drafter_sequences",
)
MAX_GROWTH = 0.05
_METRICS_AGE_S = 1.2
_SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with its sampling, and the answer it gets alone."""

    name: str
    text: str
    fields: Mapping[str, Any]
    answer: str = ""


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """The load that is put on a server.

    Attributes:
        num_streams: streams that are open at a time.
        duration_s: how long streams are begun.
        warm_up_s: the first part of that, in which memory may grow.
        max_tokens: most tokens of an answer.
        abandoned_share: share of the clients that hang up.
    """

    num_streams: int
    duration_s: float
    warm_up_s: float
    max_tokens: int
    abandoned_share: float


@dataclass(slots=True)
class Outcomes:
    """What became of all requests: each is in exactly one count."""

    num_right: int = 0
    num_rejected: int = 0
    num_abandoned: int = 0
    num_output_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def num_sent(self) -> int:
        return (
            self.num_right
            + self.num_rejected
            + self.num_abandoned
            + len(self.wrong)
            + len(self.failed)
        )

    def note(self, question: Question, record: RequestRecord) -> None:
        """Count a request that has ended."""
        if record.outcome is Outcome.REJECTED:
            self.num_rejected += 1
        elif record.outcome is Outcome.FAILED:
            self.failed.append(f"{question.name}: {record.error}")
        elif record.text != question.answer:
            self.wrong.append(f"{question.name}: {record.text!r}, alone {question.answer!r}")
        else:
            self.num_right += 1
            self.num_output_tokens += record.num_output_tokens


async def answers_alone(client: OpenAIClient, texts: Sequence[tuple[str, str]]) -> list[Question]:
    """Return the answers to every text asked by itself, greedy and sampled."""
    questions = []
    for number, (name, text) in enumerate(texts):
        for setting, sampling in SETTINGS.items():
            fields = {**sampling, "seed": number}
            record = await client.ask(name, text, **fields)
            assert record.outcome is Outcome.COMPLETED, record.error
            questions.append(Question(f"{name}/{setting}", text, fields, record.text))
    return questions


async def run_streams(
    client: OpenAIClient, questions: Sequence[Question], load: StreamLoad
) -> Outcomes:
    """Keep streams open as long as ``load`` says, then let those under way end."""
    outcomes = Outcomes()
    until_s = time.monotonic() + load.duration_s

    async def stream(number: int) -> None:
        chooser = random.Random(number)
        while time.monotonic() < until_s:
            question = chooser.choice(questions)
            asking = asyncio.create_task(
                client.ask(question.name, question.text, **question.fields)
            )
            patience_s = None
            if chooser.random() < load.abandoned_share:
                patience_s = chooser.uniform(0.0, 3.0)
            done, _ = await asyncio.wait({asking}, timeout=patience_s)
            if not done:
                asking.cancel()
                await asyncio.wait({asking})
                outcomes.num_abandoned += 1
                continue
            record = asking.result()
            outcomes.note(question, record)
            if record.outcome is Outcome.REJECTED:
                await asyncio.sleep(record.retry_after_s * chooser.uniform(1.0, 2.0))

    async with asyncio.TaskGroup() as group:
        for number in range(load.num_streams):
            group.create_task(stream(number))
    return outcomes


def read_counts(base_url: str) -> Counter[str]:
    """Return the sums over replicas of what ``/metrics`` says, with labels that matter in the
    name."""
    time.sleep(_METRICS_AGE_S)
    counts: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{base_url}/metrics").text):
        for sample in family.samples:
            labels = [sample.labels.get(name, "") for name in ("finished_reason", "status")]
            counts[" ".join(filter(None, [sample.name, *labels]))] += sample.value
    return counts


def check(
    outcomes: Outcomes, before: Counter[str], after: Counter[str], processes: Sequence[Any]
) -> list[str]:
    """Return what is not as it must be."""
    problems = [f"wrong answer: {line}" for line in outcomes.wrong]
    problems += [f"failed: {line}" for line in outcomes.failed]
    problems += [f"{name} is {after[name]}" for name in MUST_BE_ZERO if after[name] != 0]
    problems += [f"{row['name']} has died" for row in processes if not row["is_alive"]]

    rise = partial(_rise, before, after)
    for name in after:
        if name.startswith("hdserve_http_requests_total 5") and rise(name):
            problems.append(f"{rise(name)} answers of {name}")
    done = sum(rise(f"vllm:request_success_total {reason}") for reason in ("stop", "length"))
    num_completed = outcomes.num_right + len(outcomes.wrong)
    if not num_completed <= done <= num_completed + outcomes.num_abandoned:
        problems.append(f"the server finished {done}, clients have {num_completed} answers")
    num_refused = rise("hdserve_http_requests_total 429")
    if not outcomes.num_rejected <= num_refused <= outcomes.num_rejected + outcomes.num_abandoned:
        problems.append(f"the server refused {num_refused}, clients saw {outcomes.num_rejected}")
    return problems


def _rise(before: Counter[str], after: Counter[str], name: str) -> int:
    return int(after[name] - before[name])


async def measure(
    base_url: str,
    pid: int,
    model: str,
    texts: Sequence[tuple[str, str]],
    load: StreamLoad,
) -> dict[str, Any]:
    """Put the load on a running server, whose processes descend from ``pid``."""
    body = {"model": model, "max_tokens": load.max_tokens}
    async with OpenAIClient(base_url, "chat", body) as client:
        questions = await answers_alone(client, texts)
        before = await asyncio.to_thread(read_counts, base_url)
        log = MemoryLog(server_processes(pid))
        logging = asyncio.create_task(log.run())
        started_s = time.monotonic()
        outcomes = await run_streams(client, questions, load)
        whole_s = time.monotonic() - started_s
        await asyncio.sleep(_SETTLE_S)
        logging.cancel()
    after = await asyncio.to_thread(read_counts, base_url)
    processes = log.rows(load.warm_up_s, load.duration_s)
    return {
        "num_streams": load.num_streams,
        "duration_s": load.duration_s,
        "num_questions": len(questions),
        "sent": outcomes.num_sent,
        "right": outcomes.num_right,
        "rejected": outcomes.num_rejected,
        "abandoned": outcomes.num_abandoned,
        "wrong": len(outcomes.wrong),
        "failed": len(outcomes.failed),
        "output_tokens_per_s": outcomes.num_output_tokens / whole_s,
        "drafts": _rise(before, after, "vllm:spec_decode_num_drafts_total"),
        "accepted_tokens": _rise(before, after, "vllm:spec_decode_num_accepted_tokens_total"),
        "problems": check(outcomes, before, after, processes),
        "at_the_end": {name: after[name] for name in MUST_BE_ZERO},
        "processes": processes,
        "samples": {str(pid): samples for pid, samples in log.samples.items()},
    }


def main(
    prompts: Annotated[Path, typer.Option(help="A file of prompts with `prompt` or `turns`.")],
    model: Annotated[str, typer.Option()] = "hdserve-mini",
    streams: Annotated[int, typer.Option(min=1)] = 500,
    duration_s: Annotated[float, typer.Option()] = 120.0,
    warm_up_s: Annotated[float, typer.Option()] = 30.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    slots: Annotated[int, typer.Option(min=1)] = 32,
    queued: Annotated[int, typer.Option(min=0)] = 256,
    abandoned: Annotated[float, typer.Option(help="Share of clients that hang up.")] = 0.03,
    port: Annotated[int, typer.Option()] = 8100,
    directory: Annotated[Path | None, typer.Option(help="For the server's log.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Put the load on a server; exit with 1 when something is not as it must be."""
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
    engine = {
        "dtype": "float32",
        "exact": True,
        "max_num_sequences": slots,
        "max_num_queued": queued,
    }
    config = {"models": [{"name": model, "model": model, "engine": engine}]}
    texts = [(row.name, row.text[:600]) for row in read_prompts(prompts)]
    with (
        tempfile.TemporaryDirectory() as own_directory,
        Server.hdserve(directory or Path(own_directory), config, port) as server,
    ):
        load = StreamLoad(streams, duration_s, warm_up_s, max_tokens, abandoned)
        result = asyncio.run(measure(server.base_url, server.pid, model, texts, load))
    result |= {"model": model, "engine": engine, "commit": commit(), "hardware": cpu_name()}
    result["problems"] += too_much_growth(result["processes"])
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    report(result)
    raise typer.Exit(bool(result["problems"]))


def too_much_growth(processes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the processes of hdserve whose memory was not flat."""
    own = [(row["name"], row["rss_growth"]) for row in processes if row["is_hdserve"]]
    gone = [f"{name} was not there in the second half" for name, growth in own if growth is None]
    grown = [(name, growth) for name, growth in own if growth is not None and growth > MAX_GROWTH]
    return gone + [f"{name} grew by {growth:.1%}" for name, growth in grown]


def _shown(growth: float | None) -> str:
    return "-" if growth is None else f"{growth:+.1%}"


def report(result: Mapping[str, Any]) -> None:
    """Print a table."""
    shown = ("sent", "right", "rejected", "abandoned", "wrong", "failed", "output_tokens_per_s")
    console = Console()
    console.print(", ".join(f"{name} {result[name]:.0f}" for name in shown))
    table = Table("process", "of hdserve", "RSS MiB, second half", "change", "private", "change")
    for row in result["processes"]:
        table.add_row(
            row["name"],
            "yes" if row["is_hdserve"] else "",
            " .. ".join(map(str, row["rss_mib"])),
            _shown(row["rss_growth"]),
            " .. ".join(map(str, row["private_mib"])),
            _shown(row["private_growth"]),
        )
    console.print(table)
    for problem in result["problems"][:20]:
        console.print(f"[red]{problem[:400]}[/red]")


if __name__ == "__main__":
    typer.run(main)

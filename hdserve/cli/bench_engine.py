"""``hdserve bench engine``: tokens per second against what users would pick instead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from hdserve.bench.environment import commit, cpu_name
from hdserve.cli.interruption import how_to_go_on, interruptible
from hdserve.cli.json_option import JobJson, JsonOutput
from hdserve.cli.number_list import numbers
from hdserve.cli.progress import progress
from hdserve.cli.prompts_option import HELP as PROMPTS_HELP
from hdserve.errors import ConfigError
from hdserve.journal import Journal, file_digest

if TYPE_CHECKING:
    from hdserve.bench.contenders import Contender, State, Task
    from hdserve.bench.engine import Result
    from hdserve.bench.prompts import EncodedPrompt
    from hdserve.engine.host import ModelHost

CONTENDERS = ("autoregressive", "hierarchy", "transformers", "transformers-prompt-lookup")
STATES = ("cold", "online", "warm")

_NO_PACE = 1000.0
"""Prompts go through in whole chunks: a pace follows the times of steps, so chance has a part in
it, and contenders that are equal end further apart (docs/adr/0014)."""


def engine(
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=PROMPTS_HELP)] = None,
    model: Annotated[
        str, typer.Option(help="A bundled model, a directory or a Hugging Face id.")
    ] = "hdserve-tiny",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto.")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=1)] = 128,
    batch_sizes: Annotated[
        str, typer.Option(help="How many sequences are decoded together: 1,4,16 measures each.")
    ] = "1",
    compare: Annotated[str, typer.Option(help="What is measured, in this order.")] = ",".join(
        CONTENDERS
    ),
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    state: Annotated[
        str, typer.Option(help="Model database: cold (emptied before each request), online, warm.")
    ] = "cold",
    fill: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Whose answers warm the model database: a file as of --prompts, or of --replay.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="How often all is measured.", min=1)] = 9,
    exact: Annotated[bool, typer.Option(help="As `engine.exact: true` of a server.")] = False,
    compile_: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Whether hdserve's contenders run the model compiled; default: where there is a "
            "C++ compiler, as a server does.",
            show_default=False,
        ),
    ] = None,
    max_draft_tokens: Annotated[
        int, typer.Option(help="Most drafted tokens of a sequence in a step.")
    ] = 16,
    random_weights: Annotated[
        str | None,
        typer.Option(help="A shape such as llama-2-7b with noise for weights, instead of --model."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Recorded requests instead of prompts; every choice is the token of the record.",
        ),
    ] = None,
    json_path: JobJson = None,
) -> None:
    """Decode the same prompts with the same model in several ways, interleaved.

    Takes --prompts or --replay.  Ratios are to `autoregressive`, plain decoding with hdserve's
    engine, within a round; the median over the rounds and its 95 % interval are given.  At batch
    sizes that a group of prompts cannot fill, all groups are decoded together.  An interrupted job
    goes on with the first round it has not ended when the same command is run again.
    """
    from hdserve.bench.contenders import EngineContender

    if (prompts is None) == (replay is None):
        raise ConfigError("exactly one of --prompts and --replay is needed")
    if state not in STATES:
        raise ConfigError(f"--state is one of {', '.join(STATES)}")
    if (state == "warm") != (fill is not None):
        raise ConfigError("--state warm and --fill belong together")
    output = JsonOutput(json_path)
    sizes = numbers("--batch-sizes", batch_sizes)
    files = {"prompts": prompts, "fill": fill, "replay": replay}
    options = {
        "dtype": dtype,
        "exact": exact or "auto",
        "compile": _compiles() if compile_ is None else compile_,
        "max_num_sequences": max(sizes),
        "prefix_caching": False,  # every round asks the same prompts again
        "prefill_slowdown": _NO_PACE,
    }
    depends_on: dict[str, Any] = {
        "model": random_weights or model,
        "weights": "random" if random_weights else "real",
        "choices": "recorded" if replay else "the model's",
        "exact": exact,
        "compiled": options["compile"],
        "state": state,
        "commit": commit(),
    }
    with interruptible(how_to_go_on(output.file)):
        host = _make_host(model, options, max_draft_tokens, random_weights)
        depends_on |= {
            "dtype": str(host.model.dtype).removeprefix("torch."),
            "num_threads": host.num_threads,
            "hardware": _hardware(host),
        }
        unshown = {name: file_digest(path) for name, path in files.items()} | {
            "max_tokens": max_tokens,
            "batch_sizes": sizes,
            "compare": compare,
            "temperature": temperature,
            "limit": limit,
            "max_draft_tokens": max_draft_tokens,
        }
        journal = Journal(output.file, depends_on | unshown)
        tasks = _tasks(host, prompts, replay, limit, max_tokens)
        is_replay = replay is not None
        contenders = _make_contenders(compare, host, cast("State", state), is_replay=is_replay)
        if fill is not None:
            _fill(contenders, host, fill, max_tokens, journal, is_replay=is_replay)
        results = _measure(contenders, tasks, sizes, max_tokens, temperature, rounds, journal)
    is_exact = any(one.is_exact for one in contenders if isinstance(one, EngineContender))
    setting = depends_on | {"exact": is_exact, "interruptions": journal.num_interruptions}
    if output.has_text:
        _print(results, setting)
    output.write({"results": [{**result.to_json(), **setting} for result in results]})
    journal.finish()


def _measure(
    contenders: Sequence[Contender],
    tasks: Sequence[Task],
    sizes: Sequence[int],
    max_tokens: int,
    temperature: float,
    rounds: int,
    journal: Journal,
) -> list[Result]:
    """Run all rounds at all batch sizes, behind a progress bar."""
    from hdserve.bench.engine import run_rounds, summarise

    results: list[Result] = []
    total = sum(_num_able(contenders, size) for size in sizes) * rounds * len(tasks)
    with progress("decoding", total) as bar:
        for size in sizes:
            runs = run_rounds(
                contenders,
                tasks,
                batch_size=size,
                max_tokens=max_tokens,
                sampling={"temperature": temperature},
                num_rounds=rounds,
                journal=journal,
                progress=bar.advance,
            )
            results += summarise(runs, size, temperature)
    return results


def _compiles() -> bool:
    from hdserve.engine.compiled_forward import can_compile

    return can_compile()


def _make_host(
    model: str, options: Mapping[str, Any], max_draft_tokens: int, random_weights: str | None
) -> ModelHost:
    from hdserve.bench.random_weights import random_host
    from hdserve.config import ModelConfig, checked
    from hdserve.engine.host import ModelHost

    config = checked(
        ModelConfig,
        {
            "name": random_weights or model,
            "model": model,
            "engine": options,
            "drafting": {"max_draft_tokens": max_draft_tokens},
        },
    )
    return ModelHost(config) if random_weights is None else random_host(config, random_weights)


def _tasks(
    host: ModelHost, prompts: Path | None, replay: Path | None, limit: int | None, max_tokens: int
) -> list[Task]:
    from hdserve.bench.contenders import Task
    from hdserve.bench.prompts import EncodedPrompt, encode_prompt
    from hdserve.bench.replay_files import read_replay
    from hdserve.prompts import PromptRow, read_prompts

    encoded: dict[str, list[EncodedPrompt]] = defaultdict(list)
    recorded: dict[str, list[Sequence[int]]] = defaultdict(list)
    if prompts is not None:
        longest = host.model.max_model_len - max_tokens
        for row in read_prompts(prompts, limit):
            encoded[row.task].append(encode_prompt(row, host.tokenizer, longest))
        return [Task(name, found) for name, found in encoded.items()]
    assert replay is not None
    for request in read_replay(replay, limit):
        if len(request.prompt) + max_tokens <= host.model.max_model_len:
            prompt_row = PromptRow(request.name, request.task, "")
            encoded[request.task].append(EncodedPrompt(prompt_row, request.prompt, is_cut=False))
            recorded[request.task].append(request.response)
    return [Task(name, found, recorded[name]) for name, found in encoded.items()]


def _make_contenders(
    compare: str, host: ModelHost, state: State, *, is_replay: bool
) -> list[Contender]:
    from hdserve.bench.contenders import EngineContender, GenerateContender

    names = compare.split(",")
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise ConfigError(f"unknown contender {unknown[0]!r}; known: {', '.join(CONTENDERS)}")
    if is_replay and "transformers-prompt-lookup" in names:
        raise ConfigError("transformers-prompt-lookup cannot follow recorded choices")
    made: list[Contender] = []
    for name in names:
        if name.startswith("transformers"):
            made.append(GenerateContender(name, host, looks_up=name.endswith("lookup")))
        else:
            is_drafting = name == "hierarchy"
            made.append(EngineContender(name, host, is_drafting=is_drafting, state=state))
    return made


def _fill(
    contenders: Sequence[Contender],
    host: ModelHost,
    fill: Path,
    max_tokens: int,
    journal: Journal,
    *,
    is_replay: bool,
) -> None:
    from hdserve.bench.contenders import EngineContender
    from hdserve.bench.prompts import encode_prompt
    from hdserve.bench.replay_files import read_replay
    from hdserve.prompts import read_prompts

    for contender in contenders:
        if not isinstance(contender, EngineContender) or not contender.is_drafting:
            continue
        if is_replay:
            contender.fill_with([row.response for row in read_replay(fill)])
            continue
        longest = host.model.max_model_len - max_tokens
        rows = [encode_prompt(row, host.tokenizer, longest) for row in read_prompts(fill)]
        with progress("filling", len(rows)) as bar:
            answer = partial(contender.answers, rows, max_tokens, bar.show)
            contender.fill_with(journal.once(f"{contender.name}, fill", answer))


def _num_able(contenders: Sequence[Contender], batch_size: int) -> int:
    return sum(
        contender.max_batch_size is None or batch_size <= contender.max_batch_size
        for contender in contenders
    )


def _hardware(host: ModelHost) -> str:
    if host.model.device.type == "cuda":
        return host.device_name
    return f"{cpu_name()}, {host.num_threads} threads"


def _print(results: Sequence[Result], setting: dict[str, Any]) -> None:
    table = Table(title=", ".join(f"{key}: {value}" for key, value in setting.items()))
    for column in ("batch", "task", "contender", "tokens/s", "ratio", "95 %", "accepted length"):
        table.add_column(column, justify="right" if column not in {"task", "contender"} else "left")
    for column in ("drafted", "draft ms", "forward ms", "verify ms", "rest ms", "peak MB"):
        table.add_column(column, justify="right")
    for row in results:
        ratio, low, high = row.ratio_to_autoregressive, row.ratio_low, row.ratio_high
        table.add_row(
            str(row.batch_size),
            row.task,
            row.contender,
            f"{row.tokens_per_s:.1f}",
            "-" if ratio is None else f"{ratio:.3f}",
            "-" if low is None or high is None else f"{low:.3f}..{high:.3f}",
            f"{row.mean_acceptance_length:.2f}",
            f"{row.mean_draft_tokens:.1f}",
            *(f"{row.step_ms[part]:.2f}" for part in ("draft", "forward", "verify", "rest")),
            f"{row.peak_memory_bytes / 1e6:.0f}",
        )
    Console(width=170, markup=False).print(table)

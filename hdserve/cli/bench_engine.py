"""``hdserve bench engine``: tokens per second against what users would pick instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hdserve.cli.interruption import how_to_go_on, interruptible
from hdserve.cli.json_option import JobJson, JsonOutput
from hdserve.cli.model_option import Model, ServerConfig
from hdserve.cli.options import (
    PROMPTS_HELP,
    AnswerTokens,
    Exact,
    Limit,
    Temperature,
    numbers,
    takes,
)
from hdserve.core import SamplingParams
from hdserve.drafting.registry import check_installed, known_drafters
from hdserve.errors import ConfigError

if TYPE_CHECKING:
    from hdserve.bench.engine import Result

CONTENDERS = ("autoregressive", "hierarchy", "transformers", "transformers-prompt-lookup")
STATES = ("cold", "online", "warm")
_UNABLE_TO_FOLLOW = "transformers-prompt-lookup"
"""It chooses its tokens itself, so it cannot follow a record."""

_TOLD_IF_ANY = {"cut", "in_fill"}

_ONE_BY_ONE = {"transformers", "transformers-prompt-lookup"}
"""Contenders that decode one sequence at a time."""

_WITHOUT_DRAFTER = _ONE_BY_ONE | {"autoregressive"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What is measured.

    Raises:
        ConfigError: options contradict each other, or are unknown.
        InvalidRequest: a value is out of range.
    """

    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=PROMPTS_HELP)] = None
    model: Model = None
    config: ServerConfig = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16, or auto.", show_default="that of --config, else auto"
        ),
    ] = None
    max_tokens: AnswerTokens = 128
    batch_sizes: Annotated[
        str, typer.Option(help="How many sequences are decoded together: 1,4,16 measures each.")
    ] = "1"
    compare: Annotated[
        str | None,
        typer.Option(
            help=f"What is measured, in this order; default: {','.join(CONTENDERS)}, with --replay "
            "without the last. Another drafter may take the place of hierarchy.",
            show_default=False,
        ),
    ] = None
    temperature: Temperature = 0.0
    state: Annotated[
        str,
        typer.Option(
            help="Model database: cold (emptied before each request; sequences that are decoded "
            "together still draft from one another), online, warm."
        ),
    ] = "cold"
    fill: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Whose answers warm the model database: a file as of --prompts, or of --replay.",
        ),
    ] = None
    statistics: Annotated[
        list[Path] | None,
        typer.Option(
            help="Statistics, instead of those that ship: directories made by `statistics build`, "
            "or with --replay recorded requests.",
        ),
    ] = None
    limit: Limit = None
    rounds: Annotated[int, typer.Option(help="How often all is measured.", min=1)] = 9
    exact: Exact = None
    compile_: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Whether hdserve's contenders run the model compiled; default: as --config says, "
            "else where there are a C++ compiler and the headers of Python, as a server does.",
            show_default=False,
        ),
    ] = None
    max_draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most drafted tokens of a sequence in a step; default: as --config says, else 16 "
            "on a CPU, 31 on a GPU.",
            show_default=False,
        ),
    ] = None
    random_weights: Annotated[
        str | None,
        typer.Option(help="A shape such as llama-2-7b with noise for weights, instead of --model."),
    ] = None
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Recorded requests instead of prompts; every choice is the token of the record.",
        ),
    ] = None
    json_path: JobJson = None

    def __post_init__(self) -> None:
        SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)
        if (self.prompts is None) == (self.replay is None):
            raise ConfigError("exactly one of --prompts and --replay is needed")
        if self.state not in STATES:
            raise ConfigError(f"--state is one of {', '.join(STATES)}")
        if (self.state == "warm") != (self.fill is not None):
            raise ConfigError("--state warm and --fill belong together")
        self._check_contenders()
        if self.replay is not None and _UNABLE_TO_FOLLOW in self.contenders:
            raise ConfigError(f"{_UNABLE_TO_FOLLOW} cannot follow recorded choices")
        if max(self.sizes) > 1 and _ONE_BY_ONE.issuperset(self.contenders):
            raise ConfigError(
                f"--batch-sizes {self.batch_sizes}: transformers decodes one sequence at a time; "
                "leave out the sizes above 1, or have autoregressive or a drafter in --compare"
            )

    def _check_contenders(self) -> None:
        """
        Raises:
            ConfigError: one is unknown, or cannot be loaded; or two draft, with one model database.
        """
        known = [*dict.fromkeys([*CONTENDERS, *known_drafters()])]
        for name in self.contenders:
            if name not in known:
                check_installed(name)
                raise ConfigError(f"unknown contender {name!r}; known: {', '.join(known)}")
        drafters = self._drafters
        if len(drafters) > 1:
            raise ConfigError(
                f"--compare {self.compare}: {' and '.join(drafters)} would share what was "
                "generated; compare each with autoregressive in a run of its own"
            )

    @property
    def drafter(self) -> str | None:
        """The name of the contender that drafts, if one does."""
        return next(iter(self._drafters), None)

    @property
    def _drafters(self) -> list[str]:
        return [name for name in self.contenders if name not in _WITHOUT_DRAFTER]

    @property
    def contenders(self) -> list[str]:
        """The names in ``compare``, each once, or all that can be measured."""
        if self.compare is not None:
            return [*dict.fromkeys(self.compare.split(","))]
        return [name for name in CONTENDERS if self.replay is None or name != _UNABLE_TO_FOLLOW]

    @property
    def sizes(self) -> list[int]:
        """The numbers in ``batch_sizes``, each once."""
        return [*dict.fromkeys(numbers("--batch-sizes", self.batch_sizes))]


@takes(EngineOptions)
def engine(options: EngineOptions) -> None:
    """Decode the same prompts with the same model in several ways, interleaved.

    Takes --prompts or --replay.  Ratios are to `autoregressive`, plain decoding with hdserve's
    engine, within a round; the median over the rounds is given, with its 95 % interval, or with
    their range where there are fewer than six.  At batch sizes that a group of prompts cannot fill,
    all groups are decoded together.  The peak of memory is that of the process, or of the GPU, with
    all contenders in it.  An interrupted job goes on with the first round it has not ended when the
    same command is run again.
    """
    output = JsonOutput(options.json_path)
    with interruptible(how_to_go_on(output.lasting_file)):
        from hdserve.cli.bench_engine_job import EngineJob  # takes seconds

        job = EngineJob(options, output.lasting_file)
        results = job.run()
    if output.has_text:
        print_results(results, job.setting)
    output.write({"results": [{**asdict(result), **job.setting} for result in results]})
    job.journal.finish()


def print_results(results: Sequence[Result], setting: dict[str, Any]) -> None:
    """Print a table whose title lists what all its lines have in common, and prompts that were cut
    or are in ``--fill``, if any; below it is what its batches were not."""
    from hdserve.bench.engine import has_interval

    weights = ", random weights" if setting["weights"] == "random" else ""
    told = {key: value for key, value in setting.items() if value or key not in _TOLD_IF_ANY}
    table = Table(title=", ".join(f"{key}: {value}" for key, value in told.items()))
    interval = "95 %" if has_interval(results[0].num_rounds) else "range"
    for column in ("batch", "task", "contender", "tokens/s", "ratio", interval, "accepted length"):
        table.add_column(column, justify="right" if column not in {"task", "contender"} else "left")
    for column in ("drafted", "draft ms", "forward ms", "verify ms", "rest ms", "process MB"):
        table.add_column(column, justify="right")
    for row in results:
        ratio, low, high = row.ratio_to_autoregressive, row.ratio_low, row.ratio_high
        table.add_row(
            str(row.batch_size),
            row.task,
            row.contender + weights,
            f"{row.tokens_per_s:.1f}",
            "-" if ratio is None else f"{ratio:.3f}",
            "-" if low is None or high is None else f"{low:.3f}..{high:.3f}",
            f"{row.mean_acceptance_length:.2f}",
            f"{row.mean_draft_tokens:.1f}",
            *(f"{row.step_ms[part]:.2f}" for part in ("draft", "forward", "verify", "rest")),
            f"{row.peak_memory_bytes / 1e6:.0f}",
        )
    table.caption = "\n".join(_notes(results, setting))
    Console(width=190, markup=False).print(table)


def _notes(results: Sequence[Result], setting: dict[str, Any]) -> Iterator[str]:
    """Yield what is to be known about batches."""
    if setting["state"] == "cold" and max(row.batch_size for row in results) > 1:
        yield "above batch 1, sequences that are decoded together draft from one another"
    waited: dict[tuple[int, str], int] = {}
    for row in results:
        key = row.batch_size, row.contender
        waited[key] = max(waited.get(key, 0), row.most_waiting)
    for (batch_size, contender), number in waited.items():
        if number:
            yield (
                f"batch {batch_size}, {contender}: up to {number} sequences waited at a time, for "
                "room in the KV cache (engine.kv_cache_tokens) or for a prompt that begins alike"
            )

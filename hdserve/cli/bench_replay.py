"""``hdserve bench replay``: recorded outputs through the drafters, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hdserve.bench.environment import commit
from hdserve.bench.named_drafters import NamedDrafters
from hdserve.bench.prompt_sharing import PromptSharingDatabase
from hdserve.bench.replay import Replay, ReplayMode
from hdserve.bench.replay_files import ReplayRow
from hdserve.bench.replay_result import ReplayResult
from hdserve.bench.replay_setup import (
    ending_token_ids,
    largest_id,
    load_drafting,
    open_statistics,
    read_rows,
    read_tasks,
    source_digest,
    with_min_score,
)
from hdserve.bench.task_names import ALL_TASKS
from hdserve.cli.file_names import shown_name
from hdserve.cli.interruption import how_to_go_on, interruptible
from hdserve.cli.json_option import JobJson, JsonOutput
from hdserve.cli.options import DraftingFile, OneDrafter, takes
from hdserve.cli.progress import progress
from hdserve.config import DraftingConfig
from hdserve.databases.model import ModelDatabase
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.drafting.base import Drafter, DraftResources
from hdserve.drafting.registry import build_drafters
from hdserve.errors import ConfigError
from hdserve.journal import Journal, file_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """What is replayed, through which drafters.

    Raises:
        ConfigError: options contradict each other.
    """

    evaluate: Annotated[
        Path,
        typer.Option(
            "--eval",
            metavar="FILE",
            help="Recorded requests to replay: JSON Lines with `prompt` and `response`, token ids.",
        ),
    ]
    fill: Annotated[
        list[Path] | None,
        typer.Option(help="Recorded requests that warm the model database in --mode warm."),
    ] = None
    statistics: Annotated[
        list[Path] | None,
        typer.Option(help="Statistics: replay files, or directories made by `statistics build`."),
    ] = None
    mode: Annotated[
        ReplayMode,
        typer.Option(
            help="What the model database holds: nothing, what was replayed, what --fill has, too."
        ),
    ] = ReplayMode.COLD
    budget: Annotated[
        int | None,
        typer.Option(
            help="Most drafted tokens in a step; default: `max_draft_tokens` of the configuration, "
            "or 16.",
            show_default=False,
            min=0,
            max=256,
        ),
    ] = None
    floor: Annotated[
        float,
        typer.Option(
            help="Least score of a drafted token, of drafters that take one.", min=0.0, max=0.99
        ),
    ] = 0.0
    share_prompts: Annotated[
        bool, typer.Option(help="Prompts enter the model database as well as responses.")
    ] = False
    drafter: OneDrafter = None
    config: DraftingFile = None
    concurrency: Annotated[
        int, typer.Option(help="Requests that take their steps in turn.", min=1)
    ] = 1
    limit: Annotated[int | None, typer.Option(help="Only the first N requests.", min=1)] = None
    database_mib: Annotated[int, typer.Option(help="Bound of the model database.", min=1)] = 256
    statistics_mib: Annotated[
        int, typer.Option(help="Bound of statistics that are counted from files.", min=1)
    ] = 2048
    json_path: JobJson = None

    def __post_init__(self) -> None:
        if self.mode is ReplayMode.WARM and not self.fill:
            raise ConfigError("--mode warm needs --fill")
        if self.mode is ReplayMode.COLD and self.concurrency > 1:
            raise ConfigError(
                "--mode cold replays one request at a time, since those that run feed the model "
                "database for each other; leave out --concurrency, or choose --mode online or warm"
            )


@takes(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Replay recorded outputs through the drafters that serve, without a model.

    Reports the mean acceptance length (tokens per step, the bonus token included) by task and
    overall, how much was drafted, from where it was accepted, and what drafting cost.  An
    interrupted job goes on when the same command is run again: requests that had ended are shown to
    the drafters and the model database again, in the same order, and are not drafted for again.
    """
    drafting = _drafting(options)
    if options.fill and options.mode is not ReplayMode.WARM:
        told = f"--fill is left out: in --mode {options.mode} nothing warms the model database"
        typer.echo(told, err=True)
    output = JsonOutput(options.json_path)
    shown = _shown(options, drafting)
    with interruptible(how_to_go_on(output.lasting_file)):
        journal = Journal(output.lasting_file, shown | _unshown(options, drafting))
        result = _run(options, drafting, journal)
    if output.has_text:
        title = f"{shown_name(options.evaluate)}, {options.mode}, budget {_budget(drafting)}"
        Console(markup=False).print(_table(result, title))
    interruptions = {"interruptions": journal.num_interruptions}
    output.write(shown | result.as_json() | interruptions)
    journal.finish()


def _drafting(options: ReplayOptions) -> DraftingConfig:
    found = load_drafting(options.config, options.drafter)
    if options.budget is not None:
        found = found.model_copy(update={"max_draft_tokens": options.budget})
    return with_min_score(found, options.floor) if options.floor else found


def _budget(drafting: DraftingConfig) -> int:
    """Return how many tokens are drafted in a step at most; without an engine the default is that
    of a CPU."""
    return drafting.most_draft_tokens("cpu")


def _shown(options: ReplayOptions, drafting: DraftingConfig) -> dict[str, Any]:
    """Return those settings that are written with the result."""
    return {
        "eval": shown_name(options.evaluate),
        "limit": options.limit,
        "fill": [*map(shown_name, _fill_files(options))],
        "statistics": [*map(shown_name, options.statistics or ())],
        "mode": str(options.mode),
        "config": options.config and shown_name(options.config),
        "budget": _budget(drafting),
        "floor": options.floor,
        "share_prompts": options.share_prompts,
        "concurrency": options.concurrency,
        "drafters": [each.name for each in drafting.drafters],
        "database_mib": options.database_mib,
        "statistics_mib": options.statistics_mib,
        "commit": commit(),
    }


def _unshown(options: ReplayOptions, drafting: DraftingConfig) -> dict[str, Any]:
    """Return the other settings that the result depends on."""
    recorded = (options.evaluate, *_fill_files(options))
    digests = [*map(file_digest, recorded), *map(source_digest, options.statistics or ())]
    return {
        "digests": digests,
        "drafting": drafting.model_dump(mode="json"),
    }


def _fill_files(options: ReplayOptions) -> list[Path]:
    """Return the files that warm the model database in this mode."""
    return (options.fill or []) if options.mode is ReplayMode.WARM else []


def _run(options: ReplayOptions, drafting: DraftingConfig, journal: Journal) -> ReplayResult:
    """Fill the model database and replay, with progress bars."""
    rows = read_tasks(options.evaluate, options.limit)
    fills = [row for path in _fill_files(options) for row in read_rows(path)]
    make_database = PromptSharingDatabase if options.share_prompts else ModelDatabase
    database = make_database(options.database_mib << 20)
    corpus = open_statistics(options.statistics or [], options.statistics_mib << 20)
    drafters = _make_drafters(drafting, database, corpus, [*rows, *fills])
    run = Replay(
        drafters,
        database,
        options.mode,
        _budget(drafting),
        drafting.max_depth,
        options.concurrency,
    )
    with progress("filling", len(fills)) as bar:
        run.fill(fills, bar.advance)
    with progress("replaying", len(rows)) as bar:
        run.run(rows, bar.advance, journal)
    return run.result


def _make_drafters(
    drafting: DraftingConfig,
    database: ModelDatabase,
    corpus: StatisticsDatabase | None,
    rows: Sequence[ReplayRow],
) -> tuple[Drafter, ...]:
    """Return the drafters, warmed up, for the vocabulary found in ``rows`` and ``corpus``."""
    vocab_size = largest_id(rows) + 1
    if corpus is not None and corpus.directory is not None:
        vocab_size = max(vocab_size, corpus.info.vocab_size)
    resources = DraftResources(
        vocab_size, database, corpus, ending_token_ids=ending_token_ids(rows)
    )
    drafters = build_drafters(drafting, resources)
    NamedDrafters(drafters).warm_up()
    return drafters


def _table(result: ReplayResult, title: str) -> Table:
    table = Table("", "tokens", "steps", "mean acceptance length", title=title)
    for task, length in result.by_task().items():
        tokens, steps = result.tokens_by_task[task], result.steps_by_task[task]
        if task != ALL_TASKS:
            table.add_row(task, str(tokens), str(steps), f"{length:.3f}")
    table.add_section()
    figures = result.as_json()
    total = (str(result.num_tokens), str(result.num_steps), f"{result.mean_acceptance_length:.3f}")
    table.add_row(ALL_TASKS, *total)
    draft, observe = figures["draft_latency_us"], figures["observe_latency_us"]
    accepted = ", ".join(f"{k} {v}" for k, v in figures["accepted_by_source"].items())
    table.caption = (
        f"drafted {result.mean_draft_tokens:.2f} tokens a step; accepted: {accepted or 'none'}; "
        f"expected / accepted {result.score_calibration:.3f}\n"
        f"draft p50 {draft['p50']:.1f} us, p99 {draft['p99']:.1f}; observe per token p50 "
        f"{observe['p50']:.1f}, p99 {observe['p99']:.1f}; model database "
        f"{result.database_bytes / 2**20:.1f} MiB"
    )
    return table

"""``hdserve statistics``: build and inspect statistics databases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hdserve.cli.corpus_progress import corpus_progress
from hdserve.cli.file_names import shown
from hdserve.cli.interruption import interruptible
from hdserve.cli.json_option import Json, JsonCommand, JsonOutput
from hdserve.cli.model_option import ServerConfig, chosen_model, tokenizer_of
from hdserve.cli.options import takes
from hdserve.cli.progress import bytes_progress, progress
from hdserve.databases.corpus import corpus_files
from hdserve.databases.ngram import BUCKET_BYTES
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_build import StatisticsBuild
from hdserve.databases.statistics_info import StatisticsInfo
from hdserve.databases.statistics_merge import StatisticsMerge

app = typer.Typer(help="Build and inspect statistics databases.", no_args_is_help=True)

MaxMib = Annotated[int, typer.Option("--max-mib", help="Most MiB of the table.", min=1)]
Output = Annotated[Path, typer.Option("--output", "-o", help="Directory of the database.")]

_GO_ON = "the same command keeps what was saved last and does the rest"


@dataclass(frozen=True, kw_only=True, slots=True)
class CountOptions:
    """What is counted, how it is tokenized, and where the counts go."""

    tokenizer: Annotated[
        str,
        typer.Option(
            help="Whose tokenizer it is: a bundled model, a directory or a Hugging Face id; with "
            "--config, the name of one of its models."
        ),
    ]
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            "-i",
            help="A file, directory or pattern of text, JSONL(.gz) with `text` or `messages`, or "
            "replay files; may be repeated.",
        ),
    ]
    output: Output
    more_inputs: Annotated[
        list[str] | None,
        typer.Argument(help="Further inputs, as a shell expands a pattern after --input."),
    ] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave out rows whose `source` begins so; may be repeated."),
    ] = None
    max_mib: MaxMib = 512
    checkpoint_tokens: Annotated[
        int, typer.Option(help="Save the unfinished state after this many tokens.", min=1)
    ] = 50_000_000
    config: ServerConfig = None
    json_path: Json = None


@app.command(cls=JsonCommand)
@takes(CountOptions)
@interruptible(_GO_ON)
def build(options: CountOptions) -> None:
    """Count corpora into a database.

    Rows that name a `source` and a `licence` are listed by source, with their licences.  Memory
    stays within the bound of the table.  An interrupted build goes on where it was saved when the
    same command is run again.
    """
    found = JsonOutput(options.json_path)
    corpora = corpus_files([*options.inputs, *(options.more_inputs or ())])
    excluded = tuple(options.exclude or ())
    tokenizer = tokenizer_of(chosen_model(options.tokenizer, options.config))
    eos = tokenizer.eos_token_id
    with corpus_progress(corpora) as bar:
        job = StatisticsBuild(
            options.output,
            corpora,
            tokenizer,
            tokenizer.vocab_size,
            turn_end=() if eos is None else (eos,),
            excluded_sources=excluded,
            max_bytes=options.max_mib << 20,
            checkpoint_tokens=options.checkpoint_tokens,
            on_progress=bar.report,
        )
        if job.num_resumed:
            bar.print(f"resumed after {job.num_resumed:,} segments")
        info = job.run()
    if found.has_text:
        _print(info, options.output)
        _print_excluded(job.num_excluded, excluded)
    found.write(_facts(info, options.output) | {"num_excluded": dict(job.num_excluded)})


@app.command(cls=JsonCommand)
def info(
    directory: Annotated[Path, typer.Argument(help="Directory of the database.")],
    verify: Annotated[bool, typer.Option(help="Read everything and compare checksums.")] = False,
    json_path: Json = None,
) -> None:
    """Show what is inside a database."""
    output = JsonOutput(json_path)
    database = StatisticsDatabase.open(directory)
    if verify:
        with interruptible(""), bytes_progress(database.rows.nbytes) as bar:
            database.verify(bar.advance)
    _report(database.info, directory, output)


@app.command(cls=JsonCommand)
@interruptible(_GO_ON)
def merge(
    sources: Annotated[list[Path], typer.Argument(help="Databases of one tokenizer.")],
    output: Output,
    max_mib: MaxMib = 512,
    checkpoint_s: Annotated[
        float, typer.Option(help="Least seconds between two saves of the unfinished state.", min=0)
    ] = 30.0,
    json_path: Json = None,
) -> None:
    """Write one database with the counts of several.

    An interrupted merge goes on where it was saved when the same command is run again.
    """
    found = JsonOutput(json_path)
    with progress("merging", len(sources)) as bar:
        job = StatisticsMerge(
            output,
            sources,
            max_bytes=max_mib << 20,
            checkpoint_s=checkpoint_s,
            on_progress=bar.advance,
        )
        if job.num_resumed:
            bar.print(f"resumed after {job.num_resumed:,} databases")
        merged = job.run()
    _report(merged, output, found)


def _print_excluded(num_excluded: Mapping[str, int], excluded: Sequence[str]) -> None:
    console = Console(markup=False)
    for source, num_texts in num_excluded.items():
        console.print(f"left out: {num_texts:,} texts of {source}")
    for name in excluded:
        if not any(source.startswith(name) for source in num_excluded):
            console.print(f"warning: no row has a source that begins with {name!r}")


def _report(info: StatisticsInfo, directory: Path, output: JsonOutput) -> None:
    if output.has_text:
        _print(info, directory)
    output.write(_facts(info, directory))


def _facts(info: StatisticsInfo, directory: Path) -> dict[str, object]:
    return {
        "directory": str(directory),
        "num_tokens": info.num_tokens,
        "num_bytes": info.num_buckets * BUCKET_BYTES,
        **info.model_dump(mode="json"),
    }


def _print(info: StatisticsInfo, directory: Path) -> None:
    table = Table("corpus", "licence", "texts", "tokens", title=shown(directory))
    for corpus in info.corpora:
        licences = ", ".join(corpus.licences)
        table.add_row(corpus.name, licences, f"{corpus.num_texts:,}", f"{corpus.num_tokens:,}")
    table.add_section()
    num_texts = sum(corpus.num_texts for corpus in info.corpora)
    table.add_row("all", "", f"{num_texts:,}", f"{info.num_tokens:,}")
    megabytes = info.num_buckets * BUCKET_BYTES / 2**20
    table.caption = (
        f"{info.num_contexts:,} contexts of {', '.join(map(str, info.orders))} tokens in "
        f"{megabytes:,.1f} MiB; vocabulary {info.vocab_size:,}; tokenizer {info.tokenizer[:16]}; "
        f"format {info.format_version}"
    )
    Console(markup=False).print(table)

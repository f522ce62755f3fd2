"""``hdserve database``: look into model databases on disk and carry them between clusters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn
from rich.table import Table

from hdserve.cli.database_build import build
from hdserve.cli.file_names import shown
from hdserve.cli.interruption import interruptible
from hdserve.cli.json_option import Json, JsonCommand, JsonOutput
from hdserve.cli.model_option import check_served_name, database_config
from hdserve.cli.progress import shown_bars
from hdserve.databases import archive as archives
from hdserve.databases import stored
from hdserve.databases.output_files import left_by_other_versions
from hdserve.databases.snapshot import DatabaseKey
from hdserve.journal import check_can_be_read_again

app = typer.Typer(
    help="Look into model databases and carry them between clusters.", no_args_is_help=True
)

Root = Annotated[Path, typer.Argument(help="The `snapshot_dir` of the configuration.")]
Model = Annotated[str | None, typer.Option(help="Which model, if there are several.")]
Fingerprint = Annotated[
    str,
    typer.Option(
        help="Which tokenizer, by the first digits that `info` shows, if a model had several.",
        show_default=False,
    ),
]
Archive = Annotated[Path, typer.Argument(help="The archive, a file.")]


app.command("build", cls=JsonCommand)(build)


@app.command(cls=JsonCommand)
def info(root: Root, model: Model = None, json_path: Json = None) -> None:
    """Show what the databases hold; they may be in use."""
    output = JsonOutput(json_path)
    keys = stored.find_databases(root)
    if model is not None:
        keys = [key for key in keys if key.model == model] or [stored.find_database(root, model)]
    found = [stored.describe(root, key) for key in keys]
    if output.has_text:
        Console(markup=False).print(_table(found))
        for path, what_to_do in left_by_other_versions(root).items():
            typer.echo(f"{shown(path)} is not read: {what_to_do}")
        for path in stored.shard_directories(root):
            typer.echo(f"{shown(path)} is not read: it is one of a shard; give it instead")
    output.write([_to_json(item) for item in found])


@app.command("export", cls=JsonCommand)
@interruptible("the same command starts over")
def export(
    root: Root,
    archive: Archive,
    model: Model = None,
    fingerprint: Fingerprint = "",
    json_path: Json = None,
) -> None:
    """Copy a database, which may be in use, into a new file.

    Where files of the database cannot be used, the new one is written without what they hold, and
    the exit status is 1.
    """
    output = JsonOutput(json_path)
    key = stored.find_database(root, model, fingerprint)
    with _progress(key) as on_progress:
        exported = archives.export_database(root, key, archive, on_progress)
    num_refused = exported.num_refused_files
    numbers = {"num_outputs": exported.num_outputs, "num_bytes": archive.stat().st_size}
    _report(key, {**numbers, "num_refused_files": num_refused}, output)
    if num_refused:
        told = f"{shown(archive)} lacks what {num_refused:,} files hold that could not be used"
        typer.echo(f"hdserve: {told}; the messages above name them", err=True)
        raise typer.Exit(1)


@app.command("import", cls=JsonCommand)
@interruptible("the same command adds what is not there yet")
def import_(
    archive: Archive,
    root: Root,
    model: Annotated[
        str | None,
        typer.Option(help="The model that is to have it; default: the one that generated it."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A server's configuration, whose limits hold; default: those of a server that "
            "names none.",
            show_default=False,
        ),
    ] = None,
    json_path: Json = None,
) -> None:
    """Add what a file holds to a database that is not in use.

    The tokenizer of the model that is to have it must be that of the one that generated it.  What
    would be more than a server keeps is refused.
    """
    output = JsonOutput(json_path)
    check_served_name("--model", model)
    check_can_be_read_again(archive)
    found = archives.read_archive_key(archive)
    key = DatabaseKey(found.model if model is None else model, found.fingerprint)
    stored.check_tokenizer(root, key)
    limits = database_config(config)
    with _progress(key) as on_progress:
        num = archives.import_archive(
            archive,
            root,
            key,
            on_progress,
            max_bytes=limits.max_bytes,
            max_total_bytes=limits.max_total_bytes,
            num_shards=limits.num_shards,
        )
    _report(key, {"num_new_outputs": num}, output)


@app.command(cls=JsonCommand)
def stop(
    address: Annotated[
        str | None,
        typer.Option(help="The Ray cluster; default: RAY_ADDRESS, or the one of this machine."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only the database of this model.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="End also those that cannot write what they hold.")
    ] = False,
    json_path: Json = None,
) -> None:
    """End the databases' actors, which an application leaves running for the next one.

    They write what they hold first; without a `snapshot_dir` it is lost.  One that cannot write it
    stays, and the exit status is 1.  Where several clusters run on this machine, `--address` or
    RAY_ADDRESS is needed.
    """
    from actors.stop import stop_actors

    output = JsonOutput(json_path)
    stopped = stop_actors(address or os.environ.get("RAY_ADDRESS"), model, is_forced=force)
    if output.has_text:
        for name in stopped.names:
            typer.echo(f"ended {name}")
        typer.echo(f"{stopped.address}: {len(stopped.names)} ended")
    output.write(
        {"address": stopped.address, "stopped": stopped.names, "not_stopped": stopped.kept}
    )
    for name, reason in stopped.kept.items():
        told = f"{name} is not ended, as what it holds may be nowhere else: {reason}"
        typer.echo(f"hdserve: {told}; --force ends it all the same", err=True)
    if stopped.kept:
        raise typer.Exit(1)


def _table(found: Sequence[stored.DatabaseInfo]) -> Table:
    table = Table("model", "tokenizer", "namespace", "outputs", "tokens", "calibrated")
    for item in found:
        for part in item.namespaces:
            table.add_row(
                item.key.model,
                item.key.fingerprint[:16],
                part.name,
                f"{part.num_outputs:,}",
                f"{part.num_tokens:,}",
                "yes" if part.has_calibration else "no",
            )
    refused = sum(item.num_refused_files for item in found)
    table.caption = f"{refused} files could not be used" if refused else None
    return table


@contextmanager
def _progress(key: DatabaseKey) -> Iterator[archives.Progress]:
    """Show how many of the outputs were handled."""
    with shown_bars(MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task(key.model, total=None)
        yield lambda num, total: bar.update(task, advance=num, total=total)


def _report(key: DatabaseKey, numbers: dict[str, int], output: JsonOutput) -> None:
    told = ", ".join(
        f"{value:,} {name.removeprefix('num_').replace('_', ' ')}"
        for name, value in numbers.items()
    )
    if output.has_text:
        typer.echo(f"{key.model}: {told}")
    output.write({"model": key.model, "tokenizer_fingerprint": key.fingerprint, **numbers})


def _to_json(item: stored.DatabaseInfo) -> dict[str, Any]:
    return {
        "model": item.key.model,
        "tokenizer_fingerprint": item.key.fingerprint,
        "directory": str(item.directory),
        "num_refused_files": item.num_refused_files,
        "namespaces": {
            part.name: {
                "num_outputs": part.num_outputs,
                "num_tokens": part.num_tokens,
                "has_calibration": part.has_calibration,
            }
            for part in item.namespaces
        },
    }

"""All subcommands: one module per group of them."""

from __future__ import annotations

import errno
import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from hdserve.cli import bench, config, database, doctor, generate, lossless, serve, statistics
from hdserve.cli.json_option import JsonCommand
from hdserve.errors import HdserveError

app = typer.Typer(
    name="hdserve",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("serve")(serve.serve)
app.command("generate", cls=JsonCommand)(generate.generate)
app.add_typer(bench.app, name="bench")
app.add_typer(statistics.app, name="statistics")
app.add_typer(database.app, name="database")
app.command("check-lossless", cls=JsonCommand)(lossless.check_lossless)
app.command("config", cls=JsonCommand)(config.show_config)
app.command("check-config", cls=JsonCommand)(config.check_config)
app.command("doctor", cls=JsonCommand)(doctor.doctor)

_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""The errors of a disk that is full, over its quota or broken."""


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(version("hdserve"))
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and end.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Multi-model LLM serving, losslessly accelerated by hierarchical drafting."""


def run() -> None:
    """Run the command; a user's error is one line on standard error and exit status 2."""
    try:
        app()
    except HdserveError as error:
        _fail(error.message)
    except OSError as error:
        if error.errno not in _DISK_FAULTS:
            raise
        _fail(f"cannot write: {error}")


def _fail(message: str) -> NoReturn:
    told = f"[red]hdserve:[/red] {escape(message)}"
    Console(stderr=True, soft_wrap=True).print(told, highlight=False)
    sys.exit(2)

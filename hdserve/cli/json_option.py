"""``--json [PATH]``, with the same meaning in every command.

Without ``PATH``, or with ``-``, the result is printed as JSON, and nothing else on standard output.
With ``PATH`` it is written there, in addition to the usual text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hdserve.cli.whole_file import write_whole
from hdserve.errors import ConfigError

OPTION = "--json"
STDOUT = Path("-")

_PARAM = "json_path"

_PRINT = "Print JSON instead of text; with PATH, write it there as well as the text"

Json = Annotated[Path | None, typer.Option(OPTION, metavar="[PATH]", help=f"{_PRINT}.")]
"""The option of a short command, or of one that keeps its progress in its result."""

JobJson = Annotated[
    Path | None,
    typer.Option(OPTION, metavar="[PATH]", help=f"{_PRINT}, and the job can be resumed."),
]
"""The option of a job whose journal is next to its result."""


class JsonCommand(TyperCommand):
    """A command whose ``--json`` may lack its value; Typer's options take one or take none."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse.

        Raises:
            ConfigError: the result would be written over a file that the command reads.
        """
        rest = super().parse_args(ctx, with_path(args))
        _check_is_not_read(ctx.params)
        return rest


def with_path(args: Sequence[str]) -> list[str]:
    """Return ``args`` with a value for each ``--json``: the next word is its path, if there is one
    and it is not an option."""
    found = list(args)
    for index, arg in enumerate(args):
        if arg == "--":
            break
        following = args[index + 1] if index + 1 < len(args) else "--"
        if arg == OPTION and following.startswith("-") and following != str(STDOUT):
            found[index] = f"{arg}={STDOUT}"
    return found


def _check_is_not_read(params: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: the file of ``--json`` is one that another parameter names.
    """
    written = params.get(_PARAM)
    if written is None or not os.path.isfile(written):
        return
    for name, value in params.items():
        paths = value if isinstance(value, list) else [value] if isinstance(value, Path) else []
        if name != _PARAM and any(_is_same(path, written) for path in paths):
            raise ConfigError(f"{OPTION} {written}: another argument names this file")


def _is_same(path: Path | str, file: Path) -> bool:
    return os.path.exists(path) and os.path.samefile(path, file)


class JsonOutput:
    """Where a command's JSON goes.

    Attributes:
        file: what is written; ``None`` if there is no ``PATH``.
        lasting_file: the same if it is a file, or will be one; a job that writes to a pipe or a
            device keeps nothing to be resumed from.
        has_text: whether standard output is for text.

    Raises:
        ConfigError: ``PATH`` cannot be a file.
    """

    def __init__(self, path: Path | None) -> None:
        self.has_text = path != STDOUT
        self.file = path if self.has_text else None
        is_lasting = self.file is not None and _is_lasting(self.file)
        self.lasting_file = self.file if is_lasting else None

    def write(self, value: Any) -> None:
        """Print or write ``value``, as requested."""
        text = json.dumps(value, indent=1)
        if self.file is not None:
            write_whole(self.file, text + "\n")
        elif not self.has_text:
            typer.echo(text)


def _is_lasting(path: Path) -> bool:
    """Whether ``path`` is a file, or will be one.

    Raises:
        ConfigError: it cannot be a file.
    """
    try:
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"{OPTION} {path}: is a directory, or in one that is missing")
        return path.is_file() or not path.exists()
    except OSError as error:
        raise ConfigError(f"{OPTION} {path}: cannot be written: {error.strerror}") from error

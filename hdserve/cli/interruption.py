"""Ctrl-C in a long job: it ends, and says how to continue."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from hdserve.cli import EXIT_INTERRUPTED
from hdserve.cli.json_option import OPTION, with_path

GO_ON = "the same command keeps what was finished and does the rest"

_KEY = "--api-key"
"""The option whose value is not shown when a command is printed."""

_FOR_TERMINALS = {"--show-drafts"}
"""Options that cannot go with a file."""


def how_to_go_on(result_path: Path | None) -> str:
    """Return the advice of a job whose journal is next to its result: without a result it must
    start anew; with one it could be resumed."""
    if result_path is not None:
        return GO_ON
    words = with_path(sys.argv[1:])
    for index in reversed(range(len(words))):
        if words[index] == OPTION or words[index].startswith(f"{OPTION}="):
            del words[index : index + 1 + (words[index] == OPTION)]
    for index, word in enumerate(words):
        if word.startswith(_KEY):
            words[index : index + 1 + (word == _KEY)] = [f"{_KEY}=..."]
    words = [word for word in words if word not in _FOR_TERMINALS]
    command = shlex.join(["hdserve", *words, OPTION, "FILE"])
    return f"nothing was kept to continue from. This can be resumed: {command}"


@contextmanager
def interruptible(advice: str = GO_ON) -> Iterator[None]:
    """End the command with ``EXIT_INTERRUPTED`` and a line of advice on standard error.

    Raises:
        typer.Exit: at an interruption.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {advice}" if advice else "interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None

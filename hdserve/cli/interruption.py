"""Ctrl-C in a long job: it ends, and says how it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

EXIT_INTERRUPTED = 130

GO_ON = "the same command goes on where it was"


def how_to_go_on(result_path: Path | None) -> str:
    """The advice of a job whose journal lies beside its result."""
    return GO_ON if result_path is not None else f"with --json FILE {GO_ON}"


@contextmanager
def interruptible(advice: str = GO_ON) -> Iterator[None]:
    """End the command with ``EXIT_INTERRUPTED`` and a line of advice on standard error.

    Raises:
        typer.Exit: at an interruption.
    """
    try:
        yield
    except KeyboardInterrupt:
        told = f"interrupted; {advice}" if advice else "interrupted"
        Console(stderr=True, highlight=False, soft_wrap=True).print(told)
        raise typer.Exit(EXIT_INTERRUPTED) from None

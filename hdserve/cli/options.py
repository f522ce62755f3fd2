"""Commands whose options are one frozen object, and options shared by several commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hdserve.errors import ConfigError

T = TypeVar("T")

CONFIG_DEFAULT = "default: the one HDSERVE_CONFIG names, else the bundled models"

ConfigFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help=f"A configuration file; {CONFIG_DEFAULT}.")
]

PROMPTS_HELP = (
    "A file of prompts: JSON Lines, or .jsonl.gz, each with `prompt`, `messages` or `turns`."
)

Prompts = Annotated[Path, typer.Option(metavar="FILE", help=PROMPTS_HELP)]

AnswerTokens = Annotated[int, typer.Option(help="Tokens per answer.", min=1)]

Temperature = Annotated[float, typer.Option(help="0 is greedy.", min=0.0)]

Limit = Annotated[int | None, typer.Option(help="Only the first N prompts.", min=1)]

Exact = Annotated[
    bool | None,
    typer.Option(
        help="`engine.exact` of the configuration.", show_default="that of --config, else auto"
    ),
]

OneDrafter = Annotated[
    str | None,
    typer.Option(help="Name of one drafter, with the options that --config has for it."),
]

DraftingFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="YAML with a `drafting` section.")
]


def numbers(option: str, text: str) -> list[int]:
    """Return the comma-separated numbers in ``text``.

    Raises:
        ConfigError: one of them is not a number, or below 1; the message names ``option``.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{option} is a list of numbers from 1, as in 1,8,32")
    return found


def takes(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Turn a function of ``options``, a dataclass, into a command with each of its fields as an
    option or argument."""

    def as_command(function: Callable[[T], None]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: Any) -> None:
            function(options(**values))

        command.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
        return command

    return as_command

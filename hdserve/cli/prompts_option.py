"""The option that names a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = "A file of prompts: JSON Lines, each with `prompt`, `messages` or `turns`."

Prompts = Annotated[Path, typer.Option(metavar="FILE", help=HELP)]

"""The option that names a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT = "default: the one HDSERVE_CONFIG names, else the bundled models"

ConfigFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help=f"A configuration file; {DEFAULT}.")
]

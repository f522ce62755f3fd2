"""``hdserve statistics``: build and inspect statistics databases."""

from __future__ import annotations

import typer

app = typer.Typer(help="Build and inspect statistics databases.", no_args_is_help=True)


@app.callback()
def statistics() -> None:
    """Build and inspect statistics databases."""

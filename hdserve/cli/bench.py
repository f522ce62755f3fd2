"""``hdserve bench``: measure drafting, the engine and the server."""

from __future__ import annotations

import typer

from hdserve.cli.bench_engine import engine

app = typer.Typer(help="Measure drafting, the engine and the server.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure drafting, the engine and the server."""


app.command()(engine)

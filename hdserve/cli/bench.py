"""``hdserve bench``: measure drafting, the engine and the server."""

from __future__ import annotations

import typer

from hdserve.cli.bench_engine import engine
from hdserve.cli.bench_replay import replay
from hdserve.cli.bench_serve import serve
from hdserve.cli.json_option import JsonCommand

app = typer.Typer(help="Measure drafting, the engine and the server.", no_args_is_help=True)
for measure in (engine, serve, replay):
    app.command(cls=JsonCommand)(measure)

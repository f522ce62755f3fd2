"""``hdserve doctor``: what is wrong on this machine, and commands that fix it."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hdserve.cli.json_option import Json, JsonOutput
from hdserve.cli.options import CONFIG_DEFAULT
from hdserve.config import load_config
from hdserve.config.deployed import DEFAULT_PORT, as_it_is, read_deployed_config
from hdserve.doctor.finding import Verdict

_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A configuration file, a Serve config file that holds one, or a RayService; "
            f"{CONFIG_DEFAULT}.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="Where the server is to listen; default: what the file says, or 8000.",
            min=1,
            max=65535,
        ),
    ] = None,
    json_path: Json = None,
) -> None:
    """Check Python, packages, Ray, what is reserved, the port, settings, devices, models and
    databases.

    Exits with 1 when something keeps hdserve from serving.
    """
    output = JsonOutput(json_path)
    deployed = as_it_is(load_config()) if config is None else read_deployed_config(config)
    from hdserve.doctor.diagnosis import diagnose

    console, findings = Console(highlight=False, soft_wrap=True), []
    listening_at = port or deployed.port or DEFAULT_PORT
    for finding in diagnose(deployed, listening_at, os.environ.get("RAY_ADDRESS", "")):
        findings.append(finding)
        if not output.has_text:
            continue
        colour = _COLOURS[finding.verdict]
        text = escape(f"{finding.subject}: {finding.text}")
        console.print(f"[{colour}]{finding.verdict:<8}[/{colour}] {text}")
        if finding.remedy:
            console.print(f"         mend it with: [bold]{escape(finding.remedy)}[/bold]")
    output.write([asdict(finding) for finding in findings])
    if any(finding.verdict is Verdict.FAILURE for finding in findings):
        raise typer.Exit(1)

"""``hdserve doctor``: what is wrong on this machine, and the command that mends it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hdserve.cli.json_option import Json, JsonOutput
from hdserve.config import load_config

_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


def doctor(
    config: Annotated[
        Path | None, typer.Option(help="The configuration; default: HDSERVE_CONFIG.")
    ] = None,
    port: Annotated[int, typer.Option(help="Where the server is to listen.")] = 8000,
    json_path: Json = None,
) -> None:
    """Check Python, packages, Ray, the port, devices, models and their databases.

    Exits with 1 when something keeps hdserve from serving.
    """
    output = JsonOutput(json_path)
    loaded = load_config(config)
    from hdserve.diagnosis import Verdict, diagnose

    console, findings = Console(highlight=False, soft_wrap=True), []
    for finding in diagnose(loaded, port):
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

"""``hdserve check-config`` and ``hdserve config``: what a configuration says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hdserve.cli.file_names import shown
from hdserve.cli.json_option import Json, JsonOutput
from hdserve.cli.options import ConfigFile
from hdserve.config import ModelConfig, ServeConfig, load_config
from hdserve.config.deployed import application_of, read_deployed_config
from hdserve.config.mistakes import LineOf, nowhere, place_of
from hdserve.config.relative_paths import WHERE_THEY_BEGIN, relative_paths
from hdserve.doctor.problems import find_faults, find_warnings, setting_warnings
from hdserve.errors import ConfigError
from hdserve.models import bundled_models


def check_config(
    file: Annotated[
        Path,
        typer.Argument(help="A configuration, a Serve config file that has one, or a RayService."),
    ],
    json_path: Json = None,
) -> None:
    """Check a configuration file without starting anything.

    Mistakes are named with their lines, unknown keys with the nearest known one, and the exit
    status is 2.  What several keys say together is named by model, once each of them is right.
    A missing file of the administrator's key, files of keys that everybody can read, gateways that
    are full before the replicas, a queue for fewer replicas than a model has, a GPU that no replica
    has, and what is not on this machine but may be in the pods of a RayService are warnings.  With
    --json they are `problems` and `warnings`.
    `hdserve doctor --config FILE` says what of it this machine can serve.
    """
    output = JsonOutput(json_path)
    try:
        deployed = read_deployed_config(file)
        config, line_of = deployed.config, deployed.line_of
        problems, not_here = find_faults(config, line_of)
        warnings = [*deployed.warnings, *find_warnings(config, line_of)]
    except ConfigError as error:
        config, warnings, problems = None, [], error.message.splitlines()
    else:
        if deployed.is_for_pods:
            warnings += [f"{line}; this does not matter if it is in the pods" for line in not_here]
        else:
            problems = [*not_here, *problems]
    models = () if config is None else config.models
    facts = list(map(_facts, models))
    output.write(
        {
            "file": str(file),
            "ok": not problems,
            "problems": problems,
            "warnings": warnings,
            "models": facts,
        }
    )
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    if problems and output.has_text:
        raise ConfigError("\n".join(problems if config is None else [f"{file}:", *problems]))
    if problems:
        raise typer.Exit(2)
    if not output.has_text:
        return
    for model in models:
        typer.echo(f"{model.name}: {_where(model)}, {_size(model)}")
    typer.echo(f"{shown(file)}: ok")


def show_config(
    config: ConfigFile = None,
    is_serve_yaml: Annotated[
        bool,
        typer.Option("--serve-yaml", help="As a `serveConfigV2` of Ray Serve and RayService."),
    ] = False,
    json_path: Json = None,
) -> None:
    """Print the whole configuration, with every default, or what deploys it.

    `serve deploy FILE` takes what `--serve-yaml` prints, and so does the `serveConfigV2` of a
    RayService; Ray's own `serve build` cannot read an application that is built from arguments.
    The administrator's key is left out: give it by HDSERVE_ADMIN_KEY.  Relative paths are named as
    warnings with `--serve-yaml`: they begin where Ray is started.

    What `--serve-yaml` prints listens on every interface (`host` of its `http_options`), unlike
    `hdserve serve`, and without `access.api_keys_file` everybody may ask there.  Write a `port`
    beside `host` for another one than 8000.
    """
    output = JsonOutput(json_path)
    loaded = load_config(config)
    found = loaded.model_dump(mode="json", exclude={"access": {"admin_key"}})
    if is_serve_yaml:
        found = _serve_config(loaded)
        warn_of_relative_paths(loaded)
    if output.has_text:
        typer.echo(yaml.safe_dump(found, sort_keys=False).rstrip())
    output.write(found)


def warn_of_relative_paths(config: ServeConfig, line_of: LineOf = nowhere) -> None:
    """List on standard error each path that an already running Ray cluster would open elsewhere,
    unless it was started in this directory.

    Args:
        line_of: finds the lines of the file that ``config`` is from.
    """
    for where, path in relative_paths(config):
        typer.echo(f"warning: {place_of(where, line_of)}: {path} {WHERE_THEY_BEGIN}", err=True)


def warn_of_settings(config: ServeConfig, line_of: LineOf) -> None:
    """List on standard error the settings that are probably a mistake.

    Args:
        line_of: finds the lines of the file that ``config`` is from.
    """
    for problem in setting_warnings(config):
        typer.echo(f"warning: {place_of(problem.where, line_of)}: {problem.text}", err=True)


def _serve_config(config: ServeConfig) -> dict[str, Any]:
    """Return what was set, in Ray Serve's form; where to listen is left to the cluster."""
    chosen = config.model_dump(mode="json", exclude_unset=True, exclude={"access": {"admin_key"}})
    access = {name: value for name, value in chosen.pop("access").items() if value is not None}
    chosen |= {"access": access} if access else {}
    applications = [application_of({"config": chosen})]
    return {"http_options": {"host": "0.0.0.0"}, "applications": applications}


def _facts(model: ModelConfig) -> dict[str, Any]:
    return {"name": model.name, "model": _where(model), "size": _size(model)}


def _where(model: ModelConfig) -> str:
    if model.model in bundled_models():
        return "bundled model"
    return f"directory {model.model}" if os.path.isdir(model.model) else f"{model.model} (not read)"


def _size(model: ModelConfig) -> str:
    if model.autoscaling is not None:
        return "autoscaled"
    num_replicas = model.max_num_replicas
    return "1 replica" if num_replicas == 1 else f"{num_replicas} replicas"

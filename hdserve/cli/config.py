"""``hdserve check-config`` and ``hdserve config``: what a configuration says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hdserve.cli.config_option import ConfigFile
from hdserve.cli.json_option import Json, JsonOutput
from hdserve.config import ModelConfig, ServeConfig, load_config
from hdserve.config.deployed import APPLICATION, IMPORT_PATH, read_deployed_config
from hdserve.config.mistakes import LineOf, Location, nowhere, place_of
from hdserve.errors import ConfigError
from hdserve.models import bundled_models, context_length, is_path

_IMPORT_TIMEOUT_S = 60.0
_MAX_REASON_CHARACTERS = 300


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
    Files of keys that are missing or open to everybody are warnings.  With --json they are
    `problems` and `warnings`.  `hdserve doctor --config FILE` says what of it this machine can
    serve.
    """
    output = JsonOutput(json_path)
    try:
        deployed = read_deployed_config(file)
        config, line_of = deployed.config, deployed.line_of
        problems = find_problems(config, line_of)
    except ConfigError as error:
        config, line_of, problems = None, nowhere, error.message.splitlines()
    models = () if config is None else config.models
    facts = list(map(_facts, models))
    warnings = [] if config is None else [*_warnings(config, line_of)]
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
    typer.echo(f"{file}: ok")


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
    The administrator's key is left out: give it by HDSERVE_ADMIN_KEY.
    """
    output = JsonOutput(json_path)
    loaded = load_config(config)
    found = loaded.model_dump(mode="json", exclude={"access": {"admin_key"}})
    if is_serve_yaml:
        found = _serve_config(loaded)
    if output.has_text:
        typer.echo(yaml.safe_dump(found, sort_keys=False).rstrip())
    output.write(found)


def _serve_config(config: ServeConfig) -> dict[str, Any]:
    """What was set, inside Ray Serve's form; where to listen is the cluster's to say."""
    chosen = config.model_dump(mode="json", exclude_unset=True, exclude={"access": {"admin_key"}})
    access = {name: value for name, value in chosen.pop("access").items() if value is not None}
    chosen |= {"access": access} if access else {}
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {"config": chosen},
    }
    return {"http_options": {"host": "0.0.0.0"}, "applications": [application]}


def find_problems(config: ServeConfig, line_of: LineOf) -> list[str]:
    """What only the parts that a key is meant for can tell: where it is, and the reason.

    Args:
        line_of: of the file that ``config`` is from.
    """
    return [f"{place_of(where, line_of)}: {reason}" for where, reason in _problems(config)]


def _problems(config: ServeConfig) -> Iterator[tuple[Location, str]]:
    from hdserve.access import read_access
    from hdserve.drafting.registry import check_drafters

    try:
        read_access(config.access)
    except ConfigError as error:
        yield ("access",), error.message
    for index, model in enumerate(config.models):
        try:
            check_drafters(model.drafting)
        except ConfigError as error:
            for line in error.message.splitlines():
                yield ("models", index, "drafting", "drafters"), line
        for where, reason in _model_problems(model):
            yield ("models", index, *where), reason


def _model_problems(model: ModelConfig) -> Iterator[tuple[Location, str]]:
    if is_path(model.model) and not os.path.isdir(model.model):
        yield ("model",), f"there is no directory {Path(model.model).absolute()}"
    wanted, longest = model.engine.max_model_len, context_length(model.model)
    if wanted is not None and longest is not None and wanted > longest:
        reason = f"the model was made for {longest} tokens, not for {wanted}"
        yield ("engine", "max_model_len"), reason
    if model.chat_template is not None and (reason := _template_fault(model.chat_template)):
        yield ("chat_template",), reason
    policy = model.autoscaling and model.autoscaling.policy
    if policy and (reason := _why_not_imported(policy.policy_function)):
        yield ("autoscaling", "policy", "policy_function"), reason


def _template_fault(path: Path) -> str:
    """Empty where there is none."""
    from hdserve.engine.tokenizer import read_chat_template

    try:
        read_chat_template(path)
    except ConfigError as error:
        return error.message
    return ""


def _why_not_imported(name: str) -> str:
    """Empty where it can be; from this directory, too, as `serve run` does.  What a module does
    when it is imported, it does to a process of its own."""
    resolve = "import pkgutil, sys; pkgutil.resolve_name(sys.argv[1])"
    command = [sys.executable, "-c", resolve, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{name} is not imported in {_IMPORT_TIMEOUT_S:g} s"
    if not done.returncode:
        return ""
    lines = done.stderr.splitlines() or [f"status {done.returncode}"]
    return f"{name} cannot be imported: {lines[-1][:_MAX_REASON_CHARACTERS]}"


def _warnings(config: ServeConfig, line_of: LineOf) -> Iterator[str]:
    """What may be meant as it is."""
    from hdserve.access import key_file_warnings

    for item in key_file_warnings(config.access):
        yield item.text
    for index, model in enumerate(config.models):
        directory = model.statistics
        if directory not in (None, "bundled") and not os.path.isdir(directory):
            absolute = Path(directory).absolute()
            reason = f"there is no directory {absolute} here; without one there is less to draft"
            yield f"{place_of(('models', index, 'statistics'), line_of)}: {reason}"
        for reason in _vain_drafts(config, model):
            yield f"{place_of(('models', index, 'draft_from'), line_of)}: {reason}"


def _vain_drafts(config: ServeConfig, model: ModelConfig) -> Iterator[str]:
    """Why other models never have anything for ``model`` to draft from."""
    if model.draft_from and not config.model_database.is_enabled:
        yield "model_database is off, so nothing of other models can be drafted from"
        return
    for other in config.models:
        if other.name in model.draft_from and not other.share_output:
            yield f"{other.name} has share_output: false, so there is nothing to draft from"


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

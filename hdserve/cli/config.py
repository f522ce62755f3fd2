"""``hdserve check-config``: whether a configuration says what it is meant to say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hdserve.config import ModelConfig, ServeConfig, read_config
from hdserve.errors import ConfigError
from hdserve.models import bundled_models


def check_config(
    file: Annotated[Path, typer.Argument(help="The YAML file.")],
) -> None:
    """Check a configuration file without starting anything.

    Unknown keys are named with the nearest known one.  Exits with 2 when something is wrong.  What
    of it this machine can serve, `hdserve doctor --config FILE` says.
    """
    config = read_config(file)
    problems = [*_problems(config)]
    if problems:
        raise ConfigError("\n".join([f"{file}:", *problems]))
    for model in config.models:
        typer.echo(f"{model.name}: {_where(model)}, {_size(model)}")
    typer.echo(f"{file}: ok")


def _problems(config: ServeConfig) -> list[str]:
    """What only the parts that a key is meant for can tell."""
    from hdserve.access import read_access
    from hdserve.drafting.registry import check_drafters

    found = []
    try:
        read_access(config.access)
    except ConfigError as error:
        found.append(f"access: {error.message}")
    for index, model in enumerate(config.models):
        try:
            check_drafters(model.drafting)
        except ConfigError as error:
            lines = error.message.splitlines()
            found += [f"models.{index}.drafting.drafters: {line}" for line in lines]
        if _is_path(model.model) and not Path(model.model).is_dir():
            found.append(f"models.{index}.model: there is no directory {model.model}")
    return found


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~"))


def _where(model: ModelConfig) -> str:
    if model.model in bundled_models():
        return "bundled model"
    return f"directory {model.model}" if Path(model.model).is_dir() else f"{model.model} (not read)"


def _size(model: ModelConfig) -> str:
    if model.autoscaling is not None:
        return "autoscaled"
    return "1 replica" if model.num_replicas == 1 else f"{model.num_replicas} replicas"

"""Settings of a model as options of a command: ``--set KEY=VALUE``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from hdserve.config.strict_yaml import parse_yaml
from hdserve.errors import ConfigError

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of MODEL, by its key in a configuration and in YAML, for example "
        "num_gpus=0.5 or engine.max_num_sequences=32; may be repeated.",
        show_default=False,
    ),
]


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Return what ``settings`` say, as the section of a model has it.

    Args:
        settings: each a key, in it a dot for each section, and a value in YAML.

    Raises:
        ConfigError: one has another form, or contradicts one before it.
    """
    found: dict[str, Any] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        *sections, name = key.split(".")
        if not sign or not all((*sections, name)):
            raise ConfigError(f"--set {setting}: KEY=VALUE is expected, as in num_gpus=0.5")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {setting}: {section} has a value already")
        if name in place:
            raise ConfigError(f"--set {setting}: {key} has a value already")
        place[name] = _value(setting, text)
    return found


def _value(setting: str, text: str) -> Any:
    try:
        value = parse_yaml(text)
        json.dumps(value)
    except ValueError as error:
        raise ConfigError(f"--set {setting}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"--set {setting}: a date needs quotes: KEY='\"VALUE\"'") from error
    return value

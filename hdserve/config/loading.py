"""Where a configuration comes from: one file, or the bundled models.

This is the only place that reads variables of ours from the environment: ``HDSERVE_CONFIG``,
``HDSERVE_API_KEYS_FILE``, ``HDSERVE_ADMIN_KEY_FILE`` and ``HDSERVE_ADMIN_KEY``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, SecretStr, ValidationError

from hdserve.config.application import AccessConfig, ServeConfig
from hdserve.config.mistakes import LineOf, describe_errors, nowhere
from hdserve.config.model import ModelConfig
from hdserve.config.strict_model import at_home
from hdserve.config.strict_yaml import line_of, read_yaml
from hdserve.errors import ConfigError

CONFIG_ENVIRONMENT_VARIABLE = "HDSERVE_CONFIG"
API_KEYS_FILE_ENVIRONMENT_VARIABLE = "HDSERVE_API_KEYS_FILE"
ADMIN_KEY_ENVIRONMENT_VARIABLE = "HDSERVE_ADMIN_KEY"
ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE = "HDSERVE_ADMIN_KEY_FILE"

Model = TypeVar("Model", bound=BaseModel)


def default_config() -> ServeConfig:
    """Return the configuration of ``serve run deployments:app``: the two bundled models, which
    reserve so little that one core is enough."""
    names = ("hdserve-tiny", "hdserve-mini")
    return ServeConfig(
        models=tuple(ModelConfig(name=name, model=name, num_cpus=0.2) for name in names)
    )


def parse_config(data: Mapping[str, Any], line_of: LineOf = nowhere) -> ServeConfig:
    """Check ``data`` and make a configuration of it.

    Args:
        line_of: finds the line of a location in the file ``data`` comes from.

    Raises:
        ConfigError: lists every wrong key or value, and for an unknown key the known ones.
    """
    return checked(ServeConfig, data, line_of)


def checked(model: type[Model], data: Mapping[str, Any], line_of: LineOf = nowhere) -> Model:
    """Return ``data`` as a section of a configuration.

    Raises:
        ConfigError: as :func:`parse_config` does.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # Without the error's own text, which shows values, perhaps keys.
        raise ConfigError("\n".join(describe_errors(model, error, line_of))) from None


def load_config(
    source: str | Path | Mapping[str, Any] | None = None, line_of: LineOf = nowhere
) -> ServeConfig:
    """Return the configuration, with the access settings of the environment.

    Args:
        source: a YAML file, or the content of one; default: the file ``HDSERVE_CONFIG`` names,
            else the bundled models.
        line_of: as in :func:`parse_config`, for the content of a file.

    Raises:
        ConfigError: the file cannot be read or is wrong.
    """
    if source is None or source == "":
        source = configured_path()
    if source is None:
        config = default_config()
    elif isinstance(source, Mapping):
        config = parse_config(source, line_of)
    else:
        config = read_config(source)
    return config.model_copy(update={"access": _access_by_environment(config.access)})


def configured_path() -> Path | None:
    """Return the file the environment names."""
    path = os.environ.get(CONFIG_ENVIRONMENT_VARIABLE)
    return Path(at_home(path)) if path else None


def access_variables() -> tuple[str, ...]:
    """Return the access settings of the environment, by name."""
    names = (
        API_KEYS_FILE_ENVIRONMENT_VARIABLE,
        ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE,
        ADMIN_KEY_ENVIRONMENT_VARIABLE,
    )
    return tuple(name for name in names if os.environ.get(name))


def _access_by_environment(access: AccessConfig) -> AccessConfig:
    found = {name: getattr(access, name) for name in AccessConfig.model_fields}
    if keys_file := os.environ.get(API_KEYS_FILE_ENVIRONMENT_VARIABLE):
        found["api_keys_file"] = Path(keys_file)
    if admin_key_file := os.environ.get(ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE):
        found |= {"admin_key_file": Path(admin_key_file), "admin_key": None}
    if admin_key := os.environ.get(ADMIN_KEY_ENVIRONMENT_VARIABLE):
        found |= {"admin_key_file": None, "admin_key": SecretStr(admin_key)}
    return AccessConfig(**found)


def read_config(path: str | Path) -> ServeConfig:
    """Read a YAML file, and nothing else.

    Raises:
        ConfigError: the file cannot be read or is wrong.
    """
    data, text = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: keys with values are expected, as in `models: ...`")
    try:
        return parse_config(data, partial(line_of, text))
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error.message}") from error

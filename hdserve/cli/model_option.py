"""The model of a command without a server: by its name, or with the settings a server gives it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hdserve.config import ModelConfig, ModelDatabaseConfig, ServeConfig, checked
from hdserve.config.deployed import read_deployed_config
from hdserve.config.model_name import name_fault
from hdserve.config.strict_model import at_home
from hdserve.doctor.gpus import on_its_device
from hdserve.engine.hardware.cpu_count import default_num_threads
from hdserve.errors import ConfigError
from hdserve.models import bundled_models, is_path

if TYPE_CHECKING:
    from hdserve.engine.tokenization.tokenizer import Tokenizer
    from hdserve.llm import LLM

DEFAULT_MODEL = "hdserve-tiny"

Model = Annotated[
    str | None,
    typer.Option(
        help="A bundled model, a directory or a Hugging Face id; with --config, the name of one of "
        "its models, by default the first.",
        show_default=DEFAULT_MODEL,
    ),
]

CONFIG_HELP = (
    "A server's configuration: the model gets the settings that it has there, also the number of "
    "threads."
)

ServerConfig = Annotated[Path | None, typer.Option("--config", metavar="FILE", help=CONFIG_HELP)]


def chosen_model(model: str | None, config: Path | None) -> ModelConfig:
    """Return the settings of a model.

    Args:
        model: what a configuration calls ``model``; with ``config`` the name, or another name, of
            one of its models.
        config: a file of any kind that :func:`read_deployed_config` reads.

    Raises:
        ConfigError: there is no such model, or the file cannot be read or is wrong.
    """
    if config is None:
        model = DEFAULT_MODEL if model is None else model
        return checked(ModelConfig, {"name": model or "model", "model": model})
    return model_of(read_deployed_config(config).config, config, model)


def model_of(server: ServeConfig, config: Path, model: str | None) -> ModelConfig:
    """Return the settings of a model of a server's configuration, by default the first.

    Args:
        config: where it was read.
        model: the name, or another name, of one of its models.

    Raises:
        ConfigError: there is no such model.
    """
    models = server.models
    for each in models:
        if model is None or model in (each.name, *each.aliases):
            return _as_served(each, len(models))
    known = ", ".join(each.name for each in models)
    raise ConfigError(f"{config} has no model {model!r}: there are {known}")


def directory_of(model: str) -> str | None:
    """Return the absolute path of a model that is a directory, or written as one; else ``None``."""
    is_directory = model not in bundled_models() and (is_path(model) or os.path.isdir(model))
    return os.path.abspath(at_home(model)) if is_directory else None


def check_served_name(option: str, name: str | None) -> None:
    """
    Raises:
        ConfigError: no model can be served under ``name``, the value of ``option``, so nobody would
            draft from a database of that name.
    """
    if name is not None and (reason := name_fault(name)):
        raise ConfigError(f"{option}: {reason}")


def database_config(config: Path | None) -> ModelDatabaseConfig:
    """Return the limits of a server's model database: those of ``config``, or the default ones.

    Raises:
        ConfigError: the file cannot be read or is wrong.
    """
    return read_deployed_config(config).config.model_database if config else ModelDatabaseConfig()


def with_options(config: ModelConfig, **sections: Mapping[str, Any]) -> ModelConfig:
    """Return ``config`` with other options in some of its sections.

    Raises:
        ConfigError: one is out of range.
    """
    values = config.model_dump(exclude_unset=True)
    for section, options in sections.items():
        values[section] = {**values.get(section, {}), **options}
    return checked(ModelConfig, values)


def given(**options: Any) -> dict[str, Any]:
    """Return the options of a command that are not ``None``, which leaves them to the
    configuration."""
    return {name: value for name, value in options.items() if value is not None}


def tokenizer_of(config: ModelConfig) -> Tokenizer:
    """Load the tokenizer of a model.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from hdserve.engine.tokenization.tokenizer import load_tokenizer  # takes seconds

    return load_tokenizer(config.model, config.revision, trust_remote_code=config.trust_remote_code)


def load_llm(config: ModelConfig) -> LLM:
    """Load a model to answer with.

    Raises:
        ConfigError: it cannot be loaded.
        UnsupportedModel: its architecture is not served.
    """
    from hdserve.llm import LLM  # takes seconds

    return LLM(**config.model_dump(exclude_unset=True))


def _as_served(config: ModelConfig, num_models: int) -> ModelConfig:
    """Return ``config`` with the number of threads that a replica has by default, and on the CPU
    if a replica sees no GPU."""
    default = default_num_threads(config.num_cpus, num_models)
    num_threads = config.engine.num_threads or default
    return with_options(on_its_device(config), engine={"num_threads": num_threads})

"""Relative paths in a configuration, which begin where the process that opens them was started: on
a running Ray cluster, in the directory of its ``ray start``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from hdserve.config.application import ServeConfig
from hdserve.config.mistakes import Location
from hdserve.config.model import ModelConfig
from hdserve.models import bundled_models, is_path

WHERE_THEY_BEGIN = "is relative: it begins in the directory of `ray start`, not of this command"


def relative_paths(config: ServeConfig) -> Iterator[tuple[Location, str]]:
    """Yield the location of each of them, and the path."""
    for location, path in (*_declared(config, ()), *_texts(config)):
        if not os.path.isabs(path):
            yield location, path


def _declared(section: BaseModel, location: Location) -> Iterator[tuple[Location, str]]:
    """Yield the values that can only be paths, including those of nested sections."""
    for name in type(section).model_fields:
        value, place = getattr(section, name), (*location, name)
        if isinstance(value, Path):
            yield place, str(value)
        elif isinstance(value, BaseModel):
            yield from _declared(value, place)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _declared(item, (*place, index))


def _texts(config: ServeConfig) -> Iterator[tuple[Location, str]]:
    """Yield the values that are paths unless they are names."""
    for index, model in enumerate(config.models):
        if _is_directory(model):
            yield ("models", index, "model"), model.model
        if model.statistics not in (None, "bundled"):
            yield ("models", index, "statistics"), model.statistics


def _is_directory(model: ModelConfig) -> bool:
    """Whether it is neither a bundled model nor one of the hub, as far as known here."""
    if model.model in bundled_models():
        return False
    return is_path(model.model) or os.path.isdir(model.model)

"""The models that ship with hdserve, one directory each in the Hugging Face layout, and the
statistics databases of their tokenizer."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from hdserve.models.context import written_context

BUNDLED_PREFIX = "hdserve-"
"""The prefix of the names of models that ship with the package, and of no others."""


def bundled_models() -> tuple[str, ...]:
    """Return the names of the models in this package, sorted."""
    return tuple(sorted(path.parent.name for path in _root().glob("*/config.json")))


def bundled_model_path(name: str) -> Path | None:
    """Return the directory of a bundled model, or ``None`` when no model of this name ships with
    hdserve."""
    return _root() / name if name in bundled_models() else None


def resolve_model(model: str) -> str:
    """Return the directory of a bundled model's name; other values unchanged."""
    bundled = bundled_model_path(model)
    return str(bundled) if bundled is not None else model


def is_path(model: str) -> bool:
    """Return whether ``model`` is written as a directory, existing or not."""
    return model.startswith(("/", "./", "../", "~"))


def context_length(model: str) -> int | None:
    """Return the longest context in tokens by ``config.json``; ``None`` if it does not say, or is
    not on this machine."""
    try:
        text = (Path(resolve_model(model)) / "config.json").read_text(encoding="utf-8")
        return written_context(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def bundled_statistics() -> tuple[Path, ...]:
    """Return the directories of the bundled statistics databases."""
    return tuple(sorted(path.parent for path in _root().glob("statistics/*/info.json")))


def _root() -> Path:
    """Return the directory of this package, which is installed as plain files, never as a zip
    archive."""
    return Path(str(files(__name__)))

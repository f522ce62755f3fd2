"""The models that ship with hdserve: one directory each, in the Hugging Face layout."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def bundled_models() -> tuple[str, ...]:
    """Names of the models in this package, sorted."""
    return tuple(sorted(directory.name for directory in _model_directories()))


def bundled_model_path(name: str) -> Path | None:
    """Directory of a bundled model, or None when no model of this name ships with hdserve."""
    return next((path for path in _model_directories() if path.name == name), None)


def _model_directories() -> list[Path]:
    """The package is installed as plain files, never as a zip archive."""
    root = Path(str(files(__name__)))
    return [path for path in root.iterdir() if (path / "config.json").is_file()]

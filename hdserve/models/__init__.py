"""The models that come with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def bundled_models() -> tuple[str, ...]:
    """The names of the bundled models, in alphabetical order."""
    root = Path(str(files(__name__)))
    return tuple(sorted(path.parent.name for path in root.glob("*/config.json")))


def bundled_model_path(name: str) -> Path | None:
    """The directory of a bundled model; ``None`` when there is none of this name."""
    return Path(str(files(__name__))) / name if name in bundled_models() else None


def resolve_model(model: str) -> str:
    """The directory of a bundled model's name; a directory or Hugging Face id as it is."""
    bundled = bundled_model_path(model)
    return str(bundled) if bundled is not None else model


def bundled_statistics() -> tuple[Path, ...]:
    """The directories of the bundled statistics databases."""
    root = Path(str(files(__name__)))
    return tuple(sorted(path.parent for path in root.glob("statistics/*/info.json")))

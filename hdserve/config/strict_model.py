"""What every section of a configuration is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from hdserve.config.mistakes import kinds_of


class StrictModel(BaseModel):
    """A frozen pydantic model that refuses unknown keys and non-finite numbers; ``~/`` at the
    beginning of a path is the home directory."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # it may contain keys
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse ``true`` for a number, 1 for ``true``, an empty path, which would be the working
        directory, and an impossible one; replace ``~/`` in paths."""
        assert info.field_name is not None
        kinds = kinds_of(cls.model_fields[info.field_name].annotation)
        takes_numbers = int in kinds or float in kinds
        if isinstance(value, bool) and takes_numbers and bool not in kinds:
            raise ValueError("a number is expected, not true or false")
        if type(value) in (int, float) and bool in kinds and not takes_numbers:
            raise ValueError("true or false is expected, not a number")
        is_path = Path in kinds and isinstance(value, str | Path)
        return _checked_path(str(value)) if is_path else value


def _checked_path(path: str) -> str:
    if not path:
        raise ValueError("a path must not be empty")
    if "\0" in path:
        raise ValueError("a path must not have a NUL character")
    return at_home(path)


def at_home(path: str) -> str:
    """Return ``path``, with its ``~/`` replaced, which only shells understand."""
    return os.path.expanduser(path) if path.startswith("~/") else path

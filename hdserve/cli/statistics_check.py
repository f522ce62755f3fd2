"""Why a configured model would be served without its statistics database."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hdserve.cli.model_option import tokenizer_of
from hdserve.config import ModelConfig
from hdserve.databases.statistics_info import read_info
from hdserve.errors import ConfigError, SnapshotError
from hdserve.models import bundled_models

_LESS = "without it there is less to draft"


def statistics_fault(model: ModelConfig) -> str:
    """Return the reason; empty if no problem is known.  The tokenizer of a model that is not on
    this machine is not downloaded."""
    if model.statistics in (None, "bundled"):
        return ""
    directory = Path(model.statistics)
    if not os.path.isdir(directory):
        return f"there is no directory {directory.absolute()} here; {_LESS}"
    try:
        info = read_info(directory)
    except SnapshotError as error:
        return f"{error.message}; {_LESS}"
    fingerprint = _fingerprint_here(model)
    if fingerprint in ("", info.tokenizer):
        return ""
    return f"{directory.absolute()} was made with another tokenizer; {_LESS}"


def _fingerprint_here(model: ModelConfig) -> str:
    """The fingerprint of the model's tokenizer; empty if that is not here, or cannot be loaded."""
    if model.model not in bundled_models() and not os.path.isdir(model.model):
        return ""
    with suppress(ConfigError):
        return tokenizer_of(model).fingerprint
    return ""

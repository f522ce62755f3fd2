"""hdserve: LLM serving on Ray, losslessly accelerated by hierarchical drafting."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hdserve.completion import Completion
    from hdserve.config import ServeConfig, load_config
    from hdserve.core import SamplingParams, SpeculationParams
    from hdserve.drafting.base import Drafter
    from hdserve.llm import LLM
    from hdserve.tree import DraftTree

__all__ = [
    "LLM",
    "Completion",
    "DraftTree",
    "Drafter",
    "SamplingParams",
    "ServeConfig",
    "SpeculationParams",
    "load_config",
]

_HOMES = {
    "LLM": "hdserve.llm",
    "Completion": "hdserve.completion",
    "DraftTree": "hdserve.tree",
    "Drafter": "hdserve.drafting.base",
    "SamplingParams": "hdserve.core",
    "ServeConfig": "hdserve.config",
    "SpeculationParams": "hdserve.core",
    "load_config": "hdserve.config",
}


def __getattr__(name: str) -> Any:
    """Import each name when it is first used: a command can be interrupted before any import, and
    torch alone takes seconds to import."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""hdserve: LLM serving on Ray, losslessly accelerated by hierarchical drafting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hdserve.completion import Completion
from hdserve.config import ServeConfig, load_config
from hdserve.core import SamplingParams, SpeculationParams
from hdserve.drafting.base import Drafter
from hdserve.tree import DraftTree

if TYPE_CHECKING:
    from hdserve.llm import LLM

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


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it is used."""
    if name == "LLM":
        from hdserve.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

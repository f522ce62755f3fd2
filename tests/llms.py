"""How models in this process are set up for tests."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, Any] = {
    "engine": {"compile": False, "exact": True, "kv_cache_tokens": 4096},
    "drafting": {"adapts_budget": False},
}
"""Nothing is compiled before the first answer, and what is asked beside it does not round it
differently."""


def with_threads(number: int) -> dict[str, Any]:
    """The options of a model that has so many."""
    return {**OPTIONS, "engine": {**OPTIONS["engine"], "num_threads": number}}

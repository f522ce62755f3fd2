"""What Ray can reserve."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

SMALLEST_SHARE = 0.0001


def _check_share(value: float) -> float:
    if 0 < value < SMALLEST_SHARE:
        raise ValueError(f"0, or at least {SMALLEST_SHARE:.4f}, is expected: Ray reserves no less")
    return value


Reserved = Annotated[float, Field(ge=0), AfterValidator(_check_share)]
"""An amount of a resource."""

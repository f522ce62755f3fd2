"""What Ray can reserve."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field

SMALLEST_SHARE = 0.0001
_RAY_RESOURCES: Final = ("CPU", "GPU", "memory", "object_store_memory", "bundle")


def check_share(value: float) -> float:
    """Return ``value``, which Ray can reserve.

    Raises:
        ValueError: it cannot.
    """
    if 0 < value < SMALLEST_SHARE:
        raise ValueError(f"0, or at least {SMALLEST_SHARE:.4f}, is expected: Ray reserves no less")
    return value


Reserved = Annotated[float, Field(ge=0), AfterValidator(check_share)]
"""An amount of a resource."""


def _check_names(resources: dict[str, float]) -> dict[str, float]:
    for name in resources:
        if name in _RAY_RESOURCES:
            raise ValueError(f"{name!r} is not a custom resource: Ray manages it itself")
        if not name:
            raise ValueError("a custom resource has a name")
        if not name.isascii():
            raise ValueError(f"{name!r} is not a name that Ray accepts: ASCII is expected")
    return resources


CustomResources = Annotated[
    dict[str, Annotated[Reserved, Field(strict=True)]], AfterValidator(_check_names)
]
"""Amounts of resources by the names that the administrator gave them."""

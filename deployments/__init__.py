"""hdserve on Ray Serve; ``serve run deployments:app``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deployments.application import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    """Load the application, and torch with it, only in processes that use it."""
    if name == "app":
        from deployments.application import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

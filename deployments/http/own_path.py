"""The path of a request within the application, wherever the application is mounted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope


def root_of(scope: Scope) -> str:
    """Return the path below which the application is mounted."""
    root: str = scope.get("root_path", "")
    return root


def own_path(scope: Scope) -> str:
    """Return the path of a request below the one at which the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(root_of(scope))


def without_slashes(path: str) -> str:
    """Return ``path`` without extra slashes."""
    return re.sub("/+", "/", path).rstrip("/") or "/"

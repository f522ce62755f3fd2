"""Commands that grant missing read permission."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def reading_remedy(path: Path) -> str:
    """Return the command that makes ``path`` readable, or the first unreadable directory above it;
    empty if all are readable."""
    for place in (*reversed(path.absolute().parents), path):
        needed = os.X_OK if os.path.isdir(place) else os.R_OK
        if os.path.exists(place) and not os.access(place, needed):
            return f"sudo chmod a+rX {shlex.quote(str(place))}"
    return ""

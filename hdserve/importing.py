"""Whether the object that a configuration names by an import path exists."""

from __future__ import annotations

import subprocess
import sys

_TIMEOUT_S = 60.0
_MAX_REASON_CHARACTERS = 300


def import_fault(name: str) -> str:
    """Why ``name``, as in ``module:function``, cannot be imported; empty if it can.

    The current directory is searched too, as by ``serve run``.  The import happens in a separate
    process, so side effects of the module stay there.
    """
    resolve = "import pkgutil, sys; pkgutil.resolve_name(sys.argv[1])"
    command = [sys.executable, "-c", resolve, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{name} is not imported in {_TIMEOUT_S:g} s"
    if not done.returncode:
        return ""
    lines = done.stderr.splitlines() or [f"status {done.returncode}"]
    return f"{name} cannot be imported: {lines[-1][:_MAX_REASON_CHARACTERS]}"

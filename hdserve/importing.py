"""Whether what a configuration names by its import path is there."""

from __future__ import annotations

import subprocess
import sys

_TIMEOUT_S = 60.0
_MAX_REASON_CHARACTERS = 300


def import_fault(name: str) -> str:
    """Why ``name``, as in ``module:function``, cannot be imported; empty where it can be.

    From this directory, too, as ``serve run`` does.  What a module does when it is imported, it
    does to a process of its own.
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

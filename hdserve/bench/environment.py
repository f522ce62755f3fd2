"""Where figures were measured."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path


def cpu_name() -> str:
    """Return the model name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0].partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Return the commit of this installation, ``-dirty`` with changes; its version outside a
    checkout, also where the repository around it is another project's."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--dirty")
    except (OSError, subprocess.CalledProcessError):
        return f"version {version('hdserve')}"


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    place = Path(__file__).parent
    found = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
    return found.stdout.strip()

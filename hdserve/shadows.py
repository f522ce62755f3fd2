"""Directories that hide the packages of this project.

Ray's processes look for packages in the directory in which an application was started before they
look where packages are installed.  A directory there with the name of one of ours, for example the
clone itself seen from its parent directory, is imported instead.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("hdserve", "actors", "deployments")

_IMPORT = "import importlib, sys; print(*importlib.import_module(sys.argv[1]).__path__, sep='\\n')"


def shadows(directory: Path) -> Iterator[Path]:
    """Yield what in ``directory`` hides one of our packages.

    It is imported instead of the package if Python searches that directory first.
    """
    for name in PACKAGES:
        place, module = directory / name, directory / f"{name}.py"
        if module.exists():
            yield module
        elif place.is_dir() and not _is_ours(name, place) and _is_imported(name, place):
            yield place


def _is_ours(name: str, place: Path) -> bool:
    spec = find_spec(name)
    locations = spec.submodule_search_locations if spec is not None else None
    return any(place.samefile(location) for location in locations or ())


def _is_imported(name: str, place: Path) -> bool:
    """Tell whether Python finds ``place`` first, in a new process: this one has ours already."""
    command = [sys.executable, "-c", _IMPORT, name]
    done = subprocess.run(command, cwd=place.parent, capture_output=True, text=True, check=False)
    found = [Path(line) for line in done.stdout.splitlines()]
    return done.returncode != 0 or any(path.samefile(place) for path in found)

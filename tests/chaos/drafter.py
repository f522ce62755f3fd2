"""A draft source that fails, or makes the engine fail, when it is told to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from hdserve.config import StrictModel
from hdserve.core import Sequence
from hdserve.drafting.base import Drafter, DraftResources
from hdserve.tree import DraftTree

NAME = "faulty"
_ENTRY_POINT = f"[hdserve.drafters]\n{NAME} = {__name__}:FaultyDrafter\n"


class Panic(BaseException):
    """No ``Exception``, as what extension modules in Rust raise when they panic."""


class FaultyOptions(StrictModel):
    """Options of the ``faulty`` drafter."""

    directory: Path
    """A file in it, named by the process id of a replica, says what is to happen there."""


class FaultyDrafter(Drafter):
    """Drafts nothing.

    ``raise`` in the file raises from every ``propose``; ``break`` breaks an invariant of the
    engine, so that its next step raises; ``panic`` raises what is no ``Exception``.
    """

    name = NAME
    options_model: ClassVar[type[FaultyOptions]] = FaultyOptions

    def __init__(self, resources: DraftResources, options: FaultyOptions) -> None:
        self._path = options.directory / str(os.getpid())

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        if not self._path.exists():
            return
        order = self._path.read_text()
        if order == "raise":
            raise RuntimeError("the drafter was told to fail")
        if order == "break":
            seq.num_cached_tokens += 1
        if order == "panic":
            raise Panic("the drafter was told to panic")


def tell(directory: Path, pid: int, order: str) -> None:
    """Have the drafter of the replica ``pid`` do ``order``."""
    partial = directory / f".{pid}"
    partial.write_text(order)
    partial.replace(directory / str(pid))


def install(directory: Path) -> Path:
    """Make a directory that offers the drafter to every Python with it on its path."""
    distribution = directory / "hdserve_faulty_drafter-1.dist-info"
    distribution.mkdir(parents=True, exist_ok=True)
    (distribution / "METADATA").write_text("Name: hdserve-faulty-drafter\nVersion: 1\n")
    (distribution / "entry_points.txt").write_text(_ENTRY_POINT)
    return directory

"""How often a database was opened, and the epochs of those openings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from hdserve.databases import snapshot
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import SnapshotError

VERSIONS_PER_GENERATION = 2**32
"""Each opening numbers its outputs from a new multiple, so a version never names two outputs."""

_KIND = "generation"

_NUM_SPARE_BYTES = 4096

_MAX_EPOCHS = 64


class GenerationFile:
    """The file ``generation``, and its placeholder ``generation.spare``, which holds no data.

    If the disk has no room for a new file, the spare file is overwritten in place and renamed, so
    that a run that starts on a full disk is still recorded::

        generation        of the run before  <-+  renamed
        generation.spare  of this run        --+  after it is on the disk

    Args:
        directory: of one database.
    """

    def __init__(self, directory: Path, key: DatabaseKey) -> None:
        self.path = directory / _KIND
        self._spare = directory / f"{_KIND}.spare"
        self._key = key

    def read(self) -> tuple[int, tuple[str, ...]]:
        """The number and the epochs of the last opening that could write; 0 and none if none did.

        Raises:
            SnapshotError: it cannot be read or used.
        """
        if not self.path.exists():
            return 0, ()
        payload = snapshot.read_file(self.path, kind=_KIND, key=self._key)
        try:
            return int(payload["generation"]), tuple(payload["epochs"])
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"{self.path}: no generation and epochs") from error

    def write(self, generation: int, epochs: Sequence[str]) -> None:
        """
        Raises:
            OSError: neither a new file nor the spare one can be written; the old file is unchanged.
        """
        payload = {"generation": generation, "epochs": [*epochs][-_MAX_EPOCHS:]}
        data = snapshot.encode(payload, kind=_KIND, key=self._key)
        try:
            snapshot.write_file(self.path, data)
        except OSError:
            if not self._write_over_spare(data):
                raise
        self._keep_spare()

    def _write_over_spare(self, data: bytes) -> bool:
        """Whether there was a spare file of the size of ``data``, and it could be written."""
        try:
            with open(self._spare, "r+b") as file:
                if os.fstat(file.fileno()).st_size < len(data):
                    return False
                file.write(data)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
            self._spare.replace(self.path)
            snapshot.sync_directory(self.path.parent)
        except OSError:
            return False
        return True

    def _keep_spare(self) -> None:
        """Create the spare file for the next opening, if it is missing, or is left over from an
        interrupted write, and there is room.  Its bytes are random, so that no file system can
        compress it away."""
        with contextlib.suppress(OSError):
            if not self._spare.exists() or self._spare.stat().st_size < _NUM_SPARE_BYTES:
                snapshot.write_file(self._spare, os.urandom(_NUM_SPARE_BYTES))

"""Files of the model database that cannot be used when its actor comes back."""

from __future__ import annotations

import os
import signal
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from hdserve.databases import append_log, snapshot
from hdserve.databases.snapshot import DatabaseKey
from tests.chaos import processes
from tests.chaos.fault import Fault, Trial


class SnapshotFault(Fault):
    """The actor dies, and what it finds on disk is not what it wrote.

    It is stopped while the file changes, so that it does not write in between.
    """

    may_refuse_nothing: ClassVar[bool] = False

    def inject(self, trial: Trial) -> None:
        trial.system.call_database("snapshot_now")
        directory = database_directory(trial)
        self._before = trial.system.pids("model database")
        (pid,) = self._before
        os.kill(pid, signal.SIGSTOP)
        files = output_files(directory)
        for path in files:
            self.change(path, trial)
        trial.details["files_changed"] = len(files)
        trial.expect(bool(files), "there was no file to change")
        processes.kill(pid)

    @abstractmethod
    def change(self, path: Path, trial: Trial) -> None:
        """Make ``path`` unusable."""

    def is_recovered(self, trial: Trial) -> bool:
        """Once a new actor answers."""
        info = trial.system.database_info()
        if info is None or info["pid"] in self._before:
            return False
        trial.details["files_refused"] = info["num_refused_files"]
        return True

    def check(self, trial: Trial) -> None:
        is_refused = trial.details["files_refused"] > 0
        trial.expect(is_refused or self.may_refuse_nothing, "no file was refused")


class SnapshotTruncated(SnapshotFault):
    """Each file ends somewhere in its middle, as if the rest never came to the disk."""

    name = "snapshot-truncated"
    may_refuse_nothing = True

    def change(self, path: Path, trial: Trial) -> None:
        size = path.stat().st_size
        os.truncate(path, size * (3 + trial.number % 5) // 10)


class SnapshotBitFlipped(SnapshotFault):
    name = "snapshot-bit-flipped"

    def change(self, path: Path, trial: Trial) -> None:
        data = bytearray(path.read_bytes())
        position = len(data) * (1 + trial.number % 10) // 11
        data[position] ^= 1 << trial.number % 8
        path.write_bytes(data)


class SnapshotOfAnotherTokenizer(SnapshotFault):
    """Every file is a whole one, of a database with another tokenizer."""

    name = "snapshot-of-another-tokenizer"

    def change(self, path: Path, trial: Trial) -> None:
        head, rest = _take_head(path)
        own, kind = trial.system.key(), path.suffix.removeprefix(".")
        payload = snapshot.decode(
            head, kind=kind, fingerprint=own.fingerprint, max_bytes=snapshot.MAX_FILE_BYTES
        )
        foreign = DatabaseKey(own.model, "0" * len(own.fingerprint))
        _write_head(path, snapshot.encode(payload, kind=kind, key=foreign), rest)


class SnapshotOfNewerVersion(SnapshotFault):
    """Every file says that a newer program wrote it."""

    name = "snapshot-of-newer-version"

    def change(self, path: Path, trial: Trial) -> None:
        head, rest = _take_head(path)
        name = b"\xa7version"
        old = name + bytes([snapshot.FORMAT_VERSION])
        new = name + bytes([snapshot.FORMAT_VERSION + 1])
        assert old in head
        _write_head(path, head.replace(old, new, 1), rest)


def database_directory(trial: Trial) -> Path:
    """Where the actor keeps its files."""
    info = trial.system.call_database("info")
    return Path(info["directory"])


def output_files(directory: Path) -> list[Path]:
    """Logs and chunks of all namespaces, without those that were set aside before."""
    return [path for path in directory.glob("*/*") if path.suffix in (".log", ".chunk")]


def _take_head(path: Path) -> tuple[bytes, bytes]:
    """The envelope a file begins with, and what follows it."""
    data = path.read_bytes()
    if path.suffix != ".log":
        return data, b""
    taken = append_log.take_record(data)
    assert taken is not None
    head, end = taken
    return head, data[end:]


def _write_head(path: Path, head: bytes, rest: bytes) -> None:
    path.write_bytes(head if path.suffix != ".log" else append_log.pack_record(head) + rest)

"""A log with its store, in this process and in others."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hdserve.databases.output_log import OutputLog
from hdserve.databases.output_store import OutputStore
from hdserve.databases.segment import Segment, concatenate
from hdserve.databases.snapshot import DatabaseKey

KEY = DatabaseKey("a-model", "f" * 32)
ROOT = Path(__file__).parents[2]


class Database:
    """A log with its store, used as the actor uses them."""

    def __init__(self, directory: Path, key: DatabaseKey = KEY, max_bytes: int = 10**6) -> None:
        self.store = OutputStore(directory, key, lock_timeout_s=0.2)
        self.log = OutputLog(
            max_bytes, max_bytes, first_version=self.store.first_version, chunk_bytes=500
        )
        self.store.restore(self.log)

    def append(self, namespace: str, *numbers: int, length: int = 5) -> None:
        for number in numbers:
            segment = Segment.from_outputs("r", number, [np.full(length, number, np.uint32)])
            for appended in self.log.append(namespace, segment):
                self.store.append(namespace, appended)

    def sync(self) -> bool:
        return self.store.sync(self.log)

    def numbers(self, namespace: str) -> list[int]:
        segments = [segment for _, segment in self.log.partition(namespace).segments()]
        return concatenate(segments).sequence_numbers.tolist()

    def restart(self) -> "Database":
        """As after ``kill -9``: nothing more is written."""
        self.store.close()
        return Database(self.store.directory, self.store._key)

    def files(self, suffix: str) -> list[Path]:
        return sorted(self.store.directory.glob(f"*/*{suffix}"))


@contextmanager
def unreadable(pattern: str) -> Iterator[None]:
    """Files of such names cannot be read for a while, as where too many are open."""
    read = Path.read_bytes

    def read_others(path: Path) -> bytes:
        if path.match(pattern):
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_others)
        yield


@contextmanager
def no_room(_directory: Path | None = None) -> Iterator[None]:
    """No byte can be written, wherever."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def without_locks(_file: int, _operation: int) -> None:
    """In place of ``fcntl.flock``, as on some volumes."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def run_program(program: str, *args: str) -> subprocess.Popen[str]:
    """A process of its own, which may import this module."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )

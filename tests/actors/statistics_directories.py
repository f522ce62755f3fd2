"""Databases as they lie in directories, with a file that is sent in two pieces."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from actors.statistics_database import CHUNK_BYTES
from actors.statistics_files import StatisticsFiles, describe_for

NUM_BYTES = CHUNK_BYTES + 12_345


def make_database(directory: Path, fingerprint: str, seed: int = 0) -> Path:
    (directory / "tables").mkdir(parents=True)
    info = {"name": "a database", "tokenizer": fingerprint, "seed": seed}
    (directory / "info.json").write_text(json.dumps(info))
    values = np.random.default_rng(seed).integers(0, 256, NUM_BYTES, np.uint8)
    values.tofile(directory / "tables" / "order-2.bin")
    (directory / "empty.bin").write_bytes(b"")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@contextmanager
def lacking(directory: Path) -> Iterator[None]:
    """As on another node, which has no such directory."""
    is_in = StatisticsFiles.is_in

    def is_elsewhere(database: StatisticsFiles, other: Path) -> bool:
        return other != directory and is_in(database, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StatisticsFiles, "is_in", is_elsewhere)
        yield


@contextmanager
def held_elsewhere(directory: Path, fingerprint: str, cache: Path) -> Iterator[None]:
    """While another process of this node fetches a database."""
    cache.mkdir(exist_ok=True)
    lock = FileLock(cache / f"{describe_for(fingerprint, directory).database_id}.lock")
    is_held, has_ended = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            has_ended.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()

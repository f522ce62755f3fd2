"""Databases as they lie in directories, with a file that is sent in two pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from actors.statistics_database import CHUNK_BYTES
from actors.statistics_files import StatisticsFiles

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

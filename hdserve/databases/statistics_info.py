"""The files of a statistics database, and what its ``info.json`` says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from hdserve.config import StrictModel
from hdserve.errors import SnapshotError

FORMAT_VERSION = 1
STATISTICS_ORDERS = (1, 2, 3, 5)
"""Context lengths in tokens, ascending."""

INFO_NAME, TABLE_NAME = "info.json", "table.bin"
TABLE_NAMES = (TABLE_NAME, "table-2.bin")
CHECKPOINT_NAME = "unfinished"
"""The directory of the state from which an unfinished build continues; the next and the last one
have a suffix."""

PARTIAL_SUFFIX = ".partial"
MAX_CORPORA = 1000
"""The most corpora listed by name.  Later ones are listed together, so that ``info.json`` stays
small."""

MAX_LICENCES = 8
"""The most licences listed for one corpus."""

MAX_NAME_BYTES = 128
"""The most bytes of the name of a corpus or a licence."""

MAX_INFO_BYTES = 2**23
"""The most bytes of ``info.json``: as many names as there may be, each byte of them escaped."""

OTHERS = "others"
"""The name of all further corpora, and of all further licences."""


def is_unfinished(path: Path) -> bool:
    """Whether a file, named relative to the directory of a database, belongs to an unfinished build
    instead."""
    return path.parts[0].startswith(CHECKPOINT_NAME) or path.suffix == PARTIAL_SUFFIX


def _bounded(licences: tuple[str, ...]) -> tuple[str, ...]:
    """Each licence once, the first ones by name and the rest as :data:`OTHERS`."""
    found = tuple(dict.fromkeys(licences))
    return found if len(found) <= MAX_LICENCES else (*found[: MAX_LICENCES - 1], OTHERS)


class CorpusInfo(StrictModel):
    """What one corpus contributed: a file, or the rows of files that name the same source."""

    name: str
    num_texts: int = Field(ge=0)
    num_tokens: int = Field(ge=0)
    licences: tuple[str, ...] = ()
    """The licences that rows of the corpus name."""

    def plus(self, other: CorpusInfo) -> CorpusInfo:
        """Both added up, under this name."""
        return CorpusInfo(
            name=self.name,
            num_texts=self.num_texts + other.num_texts,
            num_tokens=self.num_tokens + other.num_tokens,
            licences=_bounded(self.licences + other.licences),
        )


class StatisticsInfo(StrictModel):
    """The content of ``info.json``."""

    format_version: int
    tokenizer: str
    """Fingerprint of the tokenizer whose ids the table holds."""

    vocab_size: int = Field(ge=1)
    orders: tuple[int, ...]
    corpora: tuple[CorpusInfo, ...]
    num_contexts: int = Field(ge=0)
    """Contexts held."""

    num_added: int = Field(ge=0)
    """Contexts that were counted, including those forgotten since."""

    num_buckets: int = Field(ge=1)
    sample_crc32: int
    """Checksum of the first and the last mebibyte of the table, checked on opening."""

    crc32: int
    """Checksum of the whole file, checked by :meth:`StatisticsDatabase.verify`."""

    table: Literal["table.bin", "table-2.bin"] = "table.bin"
    """The file of the table."""

    @property
    def num_tokens(self) -> int:
        return sum(corpus.num_tokens for corpus in self.corpora)


def read_info(directory: Path) -> StatisticsInfo:
    """Read and check ``info.json``.

    Raises:
        SnapshotError: it is missing, corrupt or of a newer format.
    """
    path = directory / INFO_NAME
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise SnapshotError(f"{directory}: no statistics database: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{path}: is corrupt: {error}") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise SnapshotError(f"{path}: has format {version}, newer than {FORMAT_VERSION}")
    try:
        return StatisticsInfo.model_validate(data)
    except ValidationError as error:
        raise SnapshotError(f"{path}: is corrupt: {error.errors()[0]['msg']}") from error


def write_info(path: Path, info: StatisticsInfo) -> None:
    """Write ``info.json``."""
    written = info.model_dump_json(indent=2)
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{written}\n")
        file.flush()
        os.fsync(file.fileno())

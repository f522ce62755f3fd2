"""Replay files: recorded requests as token ids, one JSON object per line, perhaps gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hdserve.bench.task_names import ALL_TASKS
from hdserve.databases.ngram import MAX_TOKEN_ID
from hdserve.errors import DatabaseError

_WANTED = "not a recorded request: an object with `prompt` and `response`, token ids, is expected"


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One recorded request.

    Attributes:
        task: the group for figures by task; ``all`` if the file names none.
        prompt, response: token ids; the response ends with the end-of-sequence token if there was
            one.
    """

    name: str
    task: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]


def read_replay(path: str | Path, limit: int | None = None) -> Iterator[ReplayRow]:
    """Yield the first ``limit`` rows of a file.

    Raises:
        DatabaseError: the file cannot be read, or a row is not of the format.
    """
    path = Path(path)
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            for number, line in islice(lines, limit):
                yield _row(line, f"{path}, line {number}")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DatabaseError(f"{path}: cannot be read: {error}") from error


def _row(line: str, where: str) -> ReplayRow:
    try:
        data = json.loads(line)
        prompt, response = tuple(data["prompt"]), tuple(data["response"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatabaseError(f"{where}: {_WANTED}") from error
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in prompt + response):
        raise DatabaseError(f"{where}: a token id is not a number from 0 to {MAX_TOKEN_ID}")
    name, task = str(data.get("id", "")), str(data.get("task") or ALL_TASKS)
    return ReplayRow(name, task, prompt, response)

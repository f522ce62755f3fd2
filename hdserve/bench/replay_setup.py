"""Building what a replay needs: files, databases and drafters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hdserve.bench.replay_files import ReplayRow, read_replay
from hdserve.bench.task_names import name_among
from hdserve.config import DrafterConfig, DraftingConfig, checked
from hdserve.config.strict_yaml import read_yaml
from hdserve.databases.ngram import MAX_TOKEN_ID
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_info import INFO_NAME
from hdserve.databases.table_merge import find_count_shifts
from hdserve.drafting.registry import known_drafters
from hdserve.errors import ConfigError, DatabaseError
from hdserve.journal import file_digest

UNKNOWN_TOKENIZER = "unknown"


def load_drafting(path: Path | None, drafter: str | None = None) -> DraftingConfig:
    """Return the drafting configuration of a YAML file: its ``drafting`` key, or the whole file.

    Args:
        drafter: the only one that is to draft, with its options from the file.

    Raises:
        ConfigError: the file cannot be read or is wrong.
    """
    if path is None:
        return only(drafter, DraftingConfig())
    data, _ = read_yaml(path)
    return only(drafter, drafting_in(path, data))


def only(drafter: str | None, drafting: DraftingConfig) -> DraftingConfig:
    """Return ``drafting`` with one drafter, which has the options that it has there; with all, if
    none is named."""
    if drafter is None:
        return drafting
    kept = tuple(each for each in drafting.drafters if each.name == drafter)
    kept = kept or (DrafterConfig(name=drafter),)
    return drafting.model_copy(update={"drafters": kept})


def drafting_in(path: Path, data: Any) -> DraftingConfig:
    """Return the drafting configuration of ``data``, which was read from ``path``.

    Raises:
        ConfigError: it is wrong.
    """
    if isinstance(data, dict) and set(data) == {"drafting"}:
        data = data["drafting"]
    try:
        return checked(DraftingConfig, data)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error.message}") from error


def with_min_score(config: DraftingConfig, min_score: float) -> DraftingConfig:
    """Return ``config`` with a lower limit for the scores of every drafter that takes one.

    Raises:
        ConfigError: none does.
    """
    known = known_drafters()

    def takes_one(drafter: DrafterConfig) -> bool:
        found = known.get(drafter.name)
        return found is None or "min_score" in found.options_model.model_fields

    if not any(map(takes_one, config.drafters)):
        names = ", ".join(each.name for each in config.drafters)
        raise ConfigError(f"no drafter of these takes a least score: {names}")
    limit = {"min_score": min_score}
    drafters = tuple(
        DrafterConfig(name=drafter.name, options={**drafter.options, **limit})
        if takes_one(drafter)
        else drafter
        for drafter in config.drafters
    )
    return config.model_copy(update={"drafters": drafters})


def read_rows(path: Path, limit: int | None = None) -> list[ReplayRow]:
    """Return the first ``limit`` rows of a file.

    Raises:
        ConfigError: there is none.
        DatabaseError: see :func:`read_replay`.
    """
    rows = list(read_replay(path, limit))
    if not rows:
        raise ConfigError(f"{path}: there is no recorded request in it")
    return rows


def read_tasks(path: Path, limit: int | None) -> list[ReplayRow]:
    """Return the first ``limit`` rows of a file; those without a task get a name of their own.

    Raises:
        ConfigError, DatabaseError: see :func:`read_rows`.
    """
    rows = read_rows(path, limit)
    tasks = {row.task for row in rows}
    return [replace(row, task=name_among(row.task, tasks)) for row in rows]


def largest_id(rows: Sequence[ReplayRow]) -> int:
    """Return the largest token id of ``rows``; -1 if there are none."""
    return max((max((*row.prompt, *row.response), default=-1) for row in rows), default=-1)


def ending_token_ids(rows: Sequence[ReplayRow]) -> frozenset[int]:
    """Return the token that ends at least half of the responses and occurs nowhere else in them;
    empty if there is none."""
    last = Counter(row.response[-1] for row in rows if row.response)
    inside = {token for row in rows for token in row.response[:-1]}
    return frozenset(
        token
        for token, count in last.items()
        if token not in inside and count >= 2 and 2 * count >= last.total()
    )


def open_statistics(paths: Sequence[Path], max_bytes: int) -> StatisticsDatabase | None:
    """Return one statistics database of replay files and built directories.

    A single directory is mapped unchanged; several sources are counted together in memory.

    Raises:
        DatabaseError: a source cannot be read, or directories are of different tokenizers.
    """
    directories = [StatisticsDatabase.open(path) for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    if not files and len(directories) <= 1:
        return directories[0] if directories else None
    tokenizer = directories[0].info.tokenizer if directories else UNKNOWN_TOKENIZER
    vocab_size = max((d.info.vocab_size for d in directories), default=MAX_TOKEN_ID + 1)
    builder = StatisticsBuilder(tokenizer, vocab_size, max_bytes=max_bytes)
    count_shifts = find_count_shifts(directories)
    for directory in directories:
        builder.merge(directory, count_shifts)
    for path in files:
        for row in read_replay(path):
            builder.add(path.name, row.prompt)
            builder.add(path.name, row.response)
    if not builder.corpora:
        raise DatabaseError("the statistics files hold no text")
    return builder.finish()


def source_digest(path: Path) -> str | None:
    """Return the checksum of a replay file, or the one in a statistics database's description."""
    return file_digest(path / INFO_NAME if path.is_dir() else path)

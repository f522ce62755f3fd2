"""What a replica says of its statistics database, and the key for choosing another one."""

from __future__ import annotations

from typing import NamedTuple

from hdserve.config import ModelConfig
from hdserve.databases.statistics import StatisticsDatabase


class StatisticsState(NamedTuple):
    """What a replica drafts from; ``directory`` is ``None`` if there is no database."""

    replica: str
    directory: str | None = None
    num_tokens: int = 0
    num_bytes: int = 0
    corpora: tuple[str, ...] = ()

    @classmethod
    def of(cls, replica: str, database: StatisticsDatabase | None) -> StatisticsState:
        """Return the state of a replica that drafts from ``database``."""
        if database is None:
            return cls(replica)
        return cls(
            replica,
            str(database.directory),
            database.info.num_tokens,
            database.num_bytes,
            tuple(corpus.name for corpus in database.info.corpora),
        )


def choice_key(config: ModelConfig, fingerprint: str) -> str:
    """Return the key of a choice for a model: a configuration that names another database, or a
    model with another tokenizer, starts without a choice."""
    return f"{config.name}/{fingerprint}/{config.statistics}"

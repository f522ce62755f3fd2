"""What a replica says of its statistics database, and under which key another is chosen for it."""

from __future__ import annotations

from typing import NamedTuple

from hdserve.config import ModelConfig
from hdserve.databases.statistics import StatisticsDatabase


class StatisticsState(NamedTuple):
    """What a replica drafts from; ``directory`` is ``None`` where there is no database."""

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
    """Return the key under which a choice for a model is kept: a configuration that names another
    database, or a model with another tokenizer, begins without one."""
    return f"{config.name}/{fingerprint}/{config.statistics}"

"""Which actor keeps which namespaces of one model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hdserve.config import ModelDatabaseConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``num_shards`` parts of a model's namespaces; the whole if there is only one."""

    index: int = 0
    num_shards: int = 1

    @property
    def label(self) -> str:
        """The name of the shard; empty for the whole."""
        return "" if self.num_shards == 1 else f"shard-{self.index + 1}-of-{self.num_shards}"

    def config(self, config: ModelDatabaseConfig) -> ModelDatabaseConfig:
        """The configuration of its actor: each shard writes to its own directory."""
        if config.snapshot_dir is None:
            return config
        return config.model_copy(update={"snapshot_dir": config.snapshot_dir / self.label})


WHOLE = Shard()


def shard_of(namespace: str, num_shards: int) -> Shard:
    """The shard that keeps a namespace, the same in every process."""
    digest = hashlib.blake2b(namespace.encode(), digest_size=8).digest()
    return Shard(int.from_bytes(digest, "big") % num_shards, num_shards)


def shards(num_shards: int) -> list[Shard]:
    """All shards of a model's namespaces."""
    return [Shard(index, num_shards) for index in range(num_shards)]


def may_be_on_disk_alone(config: ModelDatabaseConfig) -> bool:
    """Whether a shard may have text on disk but no actor: in each cluster it is started at the
    first request of one of its namespaces."""
    return config.is_enabled and config.num_shards > 1 and config.snapshot_dir is not None

"""The actors that keep what models generated, found by the key of their database."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from actors import detached
from actors.link import ActorMissing
from actors.model_database_actor import ModelDatabaseActor
from actors.shards import WHOLE, Shard, shards
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.output_log import MergeCalibration
from hdserve.databases.snapshot import FORMAT_VERSION, DatabaseKey
from hdserve.errors import DatabaseError

METHODS_VERSION = 1
"""Increased when replicas or gateways call the actor differently: another method, or another
answer.  It is part of the actor's name, because an actor that outlives an upgrade keeps the methods
it was started with."""

_NAME_BEGIN = "model-database-"
_VERSION = f"v{FORMAT_VERSION}.{METHODS_VERSION}"
_SHARD = re.compile(rf"{_NAME_BEGIN}{re.escape(_VERSION)}(?:-shard-(\d+)-of-(\d+))?")


def actor_name(key: DatabaseKey, shard: Shard = WHOLE) -> str:
    """The actor's name in the Ray namespace ``hdserve``.

    It contains the versions of the wire format and of the methods, so that two versions of the
    program run side by side during an upgrade, each with an actor it understands.  With a
    directory, the newer actor reads the older one's files, and writes when that has ended; without
    one it starts empty, and the older one's content has to be exported.
    """
    label = f"-{shard.label}" if shard.label else ""
    return f"{_NAME_BEGIN}{_VERSION}{label}:{key.model}:{key.fingerprint[:16]}"


def model_of(name: str) -> str | None:
    """The model whose database an actor with this name keeps, of any version; ``None`` if it keeps
    none."""
    kind, _, whose = name.partition(":")
    return whose.rpartition(":")[0] if kind.startswith(_NAME_BEGIN) else None


def get_or_create(
    key: DatabaseKey,
    config: ModelDatabaseConfig,
    merge_calibration: MergeCalibration | None = None,
    shard: Shard = WHOLE,
) -> Any:
    """A handle of the database's actor, which is started if there is none in the cluster.

    An existing one keeps the settings it was started with.

    Args:
        merge_calibration: an importable function; see :class:`ModelDatabaseActor`.
        shard: the namespaces it keeps.

    Raises:
        RayError: the cluster cannot be reached.
    """
    made_of = key, shard.config(config), merge_calibration
    name = actor_name(key, shard)
    reserved = config.num_cpus, config.resources
    return detached.get_or_create(ModelDatabaseActor, name, *reserved, *made_of)


def get(key: DatabaseKey, shard: Shard = WHOLE) -> Any:
    """A handle of the actor if there is one.

    Raises:
        ValueError: there is none.
    """
    return detached.get(actor_name(key, shard))


def get_to_read(key: DatabaseKey, shard: Shard) -> Any:
    """A handle of the actor if there is one, for callers that only read.

    Raises:
        ActorMissing: there is none.
        DatabaseError: there are only actors of the model for other tokenizers.
    """
    try:
        return get(key, shard)
    except ValueError as error:
        of_model = actor_name(key, shard).rpartition(":")[0]
        if any(name.rpartition(":")[0] == of_model for name in detached.names()):
            raise DatabaseError(f"that of {key.model} is of another tokenizer") from error
        raise ActorMissing(f"nobody has started that of {key.model}") from error


def get_all(key: DatabaseKey, num_shards: int) -> dict[Shard, Any]:
    """Handles of the existing actors among those of ``num_shards`` shards."""
    found = {}
    for shard in shards(num_shards):
        with contextlib.suppress(ValueError):
            found[shard] = get(key, shard)
    return found


def get_former(key: DatabaseKey, num_shards: int) -> list[tuple[Shard, Any]]:
    """Shards and handles of the model's other actors of this version: started for another number of
    shards, or another tokenizer, and running until ``hdserve database stop``."""
    current = {actor_name(key, shard) for shard in shards(num_shards)}
    found = []
    for name in detached.names():
        kind = _SHARD.fullmatch(name.partition(":")[0])
        if kind and model_of(name) == key.model and name not in current:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                found.append((_shard(*kind.groups()), detached.get(name)))
    return found


def _shard(number: str | None, num_shards: str | None) -> Shard:
    """The shard of such a name; the whole if it has neither number."""
    return Shard(int(number) - 1, int(num_shards)) if number and num_shards else WHOLE

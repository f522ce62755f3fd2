"""Model databases whose actors run in this process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray.exceptions import RayActorError

from actors.model_database_actor import ModelDatabaseActor
from actors.shards import WHOLE
from deployments.http.cluster_database import ClusterDatabase
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.messages import Publish
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.drafting.states import pack_states

KEY = DatabaseKey("m", "f")


class Handle:
    """Of an actor that runs here, and dies after so many records of an export.

    Attributes:
        actor: another one when it was started again.
        num_imports: how often it was given something.
    """

    def __init__(self, actor: ModelDatabaseActor, num_records: int = 1000) -> None:
        self.actor = actor
        self.num_imports = 0
        self._num_records = num_records
        self.info = SimpleNamespace(remote=self._info)
        self.import_ = SimpleNamespace(remote=self._import)
        self.export = SimpleNamespace(remote=self._export)
        self.shards_on_disk = SimpleNamespace(remote=self._shards_on_disk)
        self.flush_former = SimpleNamespace(remote=self._flush_former)
        self.flush = SimpleNamespace(remote=self._flush)

    async def _info(self) -> Any:
        return self.actor.info()

    async def _shards_on_disk(self, root: Path) -> list[str]:
        return self.actor.shards_on_disk(root)

    async def _import(self, message: bytes) -> int:
        self.num_imports += 1
        return self.actor.import_(message)

    async def _flush(self, namespace: str) -> int:
        return self.actor.flush(namespace)

    async def _flush_former(self, namespace: str, root: Path, in_use: list[str]) -> None:
        self.actor.flush_former(namespace, root, in_use)

    async def _export(self, namespace: str, cursor: int) -> Any:
        if not self._num_records:
            raise RayActorError
        self._num_records -= 1
        return self.actor.export(namespace, cursor)


def database(
    num_records: int = 1000, namespaces: Iterable[str] = ("a", "b")
) -> tuple[ModelDatabaseActor, ClusterDatabase]:
    """One with an output in each of these namespaces, and its actor."""
    config = ModelDatabaseConfig()
    actor = ModelDatabaseActor(KEY, config)
    for namespace in namespaces:
        actor.import_(archive_of(namespace).encode(KEY))
    return actor, ClusterDatabase(KEY, config, {WHOLE: Handle(actor, num_records)})


def archive_of(namespace: str, num_calibration_bytes: int = 0) -> Publish:
    outputs = {namespace: Segment.from_outputs("origin", 0, [np.ones(3, np.uint32)])}
    if not num_calibration_bytes:
        return Publish("archive", outputs)
    num_head_bytes = len(pack_states({"x": bytes(2**10)})) - 2**10
    calibration = pack_states({"x": bytes(num_calibration_bytes - num_head_bytes)})
    return Publish("archive", outputs, {namespace: calibration})

"""What the administrator's routes do with actors that are gone and archives that are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from ray.exceptions import RayActorError

from deployments.admin import _ask, _Database
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.append_log import MAX_RECORD_BYTES
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseGone, InvalidRequest


def test_a_database_that_is_gone_may_come_back() -> None:
    """So the client is told to try again."""

    async def gone() -> None:
        raise RayActorError

    with pytest.raises(DatabaseGone, match="try again") as caught:
        asyncio.run(_ask(gone()))
    assert caught.value.status == 503


def test_an_archive_cannot_have_a_record_of_any_length() -> None:
    """It is refused by the length it declares, before more of it is read."""
    num_read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_read
        yield (MAX_RECORD_BYTES + 1).to_bytes(4, "little") + bytes(4)
        while True:
            num_read += 1
            yield bytes(2**16)

    database = _Database(DatabaseKey("m", "f"), ModelDatabaseConfig(), {})
    with pytest.raises(InvalidRequest, match="impossible length"):
        asyncio.run(database.import_(chunks()))
    assert num_read == 0

"""Files and archives that are not read leave their places of the gateway to others."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from deployments.http.cluster_database import ClusterDatabase
from deployments.http.routes import build_api
from tests.deployments.http.server import Counted, served, unread
from tests.deployments.http.test_admin import ADMIN_KEY, DATABASE, gateway_of
from tests.waiting import eventually

SHORT_S = 0.2


@pytest.mark.parametrize(
    "path", ["/docs/files/swagger-ui-bundle.js", f"{DATABASE}/export"], ids=["file", "archive"]
)
def test_what_is_never_read_ends(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whoever has no key, too."""

    async def export(*_: Any) -> AsyncGenerator[bytes]:
        while True:
            yield bytes(2**20)

    monkeypatch.setattr(ClusterDatabase, "export", export)
    monkeypatch.setattr("deployments.http.unread_limit.MAX_UNREAD_S", SHORT_S)
    app = Counted(build_api(gateway_of(1, monkeypatch)))
    key = "" if "files" in path else f"authorization: Bearer {ADMIN_KEY}\r\n"
    request = f"GET {path} HTTP/1.1\r\nhost: h\r\n{key}\r\n"
    with served(app, 4096) as address, unread(address, request) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
        eventually(lambda: app.num_open == 0)

"""A real HTTP server of an application, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from tests.waiting import eventually


class Counted:
    """An application, and how many of its requests are open."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.num_open = self.num_begun = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        self.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_open -= 1


@contextmanager
def served(app: Any) -> Iterator[tuple[str, int]]:
    """Where it is asked."""
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()
    server.should_exit = True
    thread.join()

"""A real HTTP server of an application, in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from tests.waiting import WAIT_S, eventually


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
def served(app: Any, num_buffered_bytes: int | None = None) -> Iterator[tuple[str, int]]:
    """Where it is asked.

    Args:
        num_buffered_bytes: about how much the system keeps of what is sent until it is read.
    """
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    (listening,) = server.servers[0].sockets
    if num_buffered_bytes is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_buffered_bytes)
    yield listening.getsockname()
    server.should_exit = True
    thread.join()


def unread(address: tuple[str, int], request: str) -> socket.socket:
    """A connection with a small buffer, on which nothing of the answer is read yet."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(WAIT_S)
    connection.connect(address)
    connection.sendall(request.encode())
    return connection

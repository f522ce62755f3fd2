"""A gateway that vanishes without closing its connections, with the power of its machine or its
network, does not leave its requests to the replicas."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from ray._private.grpc_utils import create_grpc_server_with_interceptors

MAX_TIMEOUT_MS = 30_000


def connections(port: int) -> Iterator[socket.socket]:
    """The ends at ``port`` of what is connected in this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            found.getpeername()
            if found.getsockname()[1:2] == (port,):
                yield found


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux's sockets")
def test_what_a_replica_sends_has_to_be_acknowledged() -> None:
    """Or the system closes the connection, which ends what was asked for by it: a replica always
    sends something, if only heartbeats.  No code of ours has gRPC do so."""

    async def timeouts_ms() -> list[int]:
        server = create_grpc_server_with_interceptors(asynchronous=True)  # as Ray Serve's replicas
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await reader.read(1)  # the server has the connection
            option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            return [each.getsockopt(*option) for each in connections(port)]
        finally:
            writer.close()
            await server.stop(None)

    (timeout_ms,) = asyncio.run(timeouts_ms())
    assert 0 < timeout_ms <= MAX_TIMEOUT_MS

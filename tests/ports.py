"""Ports that nobody listens at."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port nobody listens on now, and that no connection or worker of Ray is given before
    somebody does: below those of connections, above those of workers."""
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

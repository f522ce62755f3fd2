"""Clients that misbehave."""

from __future__ import annotations

import json
import socket

from tests.chaos.fault import Fault, Trial
from tests.chaos.questions import MODEL
from tests.chaos.system import key, wait_for

NUM_CLIENTS = 12
HOLD_ANSWERS = 20
HOLD_S = 60.0
IDLE_S = 60.0


class ClientNeverReads(Fault):
    """Clients ask for long streams with every detail and read nothing of them.

    Others are answered meanwhile, and once those clients are gone nothing of them is left.
    """

    name = "client-never-reads"

    def inject(self, trial: Trial) -> None:
        self._sockets = [self._ask(trial, number) for number in range(NUM_CLIENTS)]
        wanted = trial.load.num_right() + HOLD_ANSWERS
        is_going_on = wait_for(lambda: trial.load.num_right() >= wanted, HOLD_S)
        trial.expect(is_going_on, "the other clients got no answers")
        trial.details["running_at_most"] = trial.system.metric("vllm:num_requests_running")
        for connection in self._sockets:
            connection.close()

    def is_recovered(self, trial: Trial) -> bool:
        """Once no more sequences are open than the load has asked for."""
        num_running = trial.system.metric("vllm:num_requests_running")
        return 0 <= num_running <= trial.load.num_open()

    def _ask(self, trial: Trial, number: int) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", trial.system.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(
            {
                "model": MODEL,
                "prompt": f"Never read {number}",
                "max_tokens": 1500,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "include_sources": True},
            }
        )
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"authorization: Bearer {key(0)}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        return connection

"""Clients that misbehave."""

from __future__ import annotations

import json
import socket

from tests.chaos.fault import Fault, Trial
from tests.chaos.questions import MODEL
from tests.chaos.system import key, wait_for

NUM_CLIENTS = 8
NUM_TOKENS = 400
BUSY_S = 60.0
HOLD_S = 240.0


class ClientNeverReads(Fault):
    """Clients ask for streams with every detail and read nothing of them: the engine ends their
    sequences and answers others all the same, and once they are gone nothing of them is left."""

    name = "client-never-reads"

    def inject(self, trial: Trial) -> None:
        self._sockets = [self._ask(trial, number) for number in range(NUM_CLIENTS)]
        num_right = trial.load.num_right()
        trial.expect(wait_for(lambda: not self._is_usual(trial), BUSY_S), "nothing was asked")
        trial.expect(wait_for(lambda: self._is_usual(trial), HOLD_S), "slots are kept for them")
        trial.details["answers_while_unread"] = trial.load.num_right() - num_right
        trial.expect(trial.load.num_right() > num_right, "the other clients got no answers")
        for connection in self._sockets:
            connection.close()

    def is_recovered(self, trial: Trial) -> bool:
        return self._is_usual(trial)

    def _is_usual(self, trial: Trial) -> bool:
        """Whether no more sequences are decoded than the load has asked for."""
        num_running = trial.system.metric("vllm:num_requests_running")
        return 0 <= num_running <= trial.load.num_open()

    def _ask(self, trial: Trial, number: int) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", trial.system.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(
            {
                "model": MODEL,
                "prompt": f"Never read {number}",
                "max_tokens": NUM_TOKENS,
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

"""The process of an engine, for :mod:`benchmarks.peers`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hdserve.errors import ConfigError

_SCRIPT = Path(__file__).with_name("peer_engine.py")
_SHOWN_LINES = 20


class PeerProcess:
    """A process of :mod:`benchmarks.peer_engine`, with all it starts stopped but for its turns.

    As a context it is started, and killed in the end.

    Args:
        python: that has the engine's library.
        kind: of ``benchmarks.peer_engine.KINDS``.
        options: of the engine.
        environment: further environment variables.
        log: what it prints.

    Attributes:
        version: what the engine says it is.
    """

    def __init__(
        self,
        python: Path,
        kind: str,
        options: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        self.version = ""
        with log.open("w") as printed:
            self._process = subprocess.Popen(
                [str(python), str(_SCRIPT), kind, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                env={**os.environ, **(environment or {})},
                text=True,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        """
        Raises:
            ConfigError: it ended; with what it printed last.
        """
        try:
            self.version = self._read()["version"]
        except BaseException:
            self._end()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Return how many ``seconds`` the answers to ``prompts`` took, and the ``outputs``.

        Raises:
            ConfigError: it ended; with what it printed last.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        batch = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        print(json.dumps(batch), file=self._process.stdin, flush=True)
        found = self._read()
        self._signal(signal.SIGSTOP)
        return found

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            raise ConfigError("\n".join(["an engine ended:", *last]))
        found: dict[str, Any] = json.loads(line)
        return found

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _end(self) -> None:
        with self._process:  # closes its pipes and waits for it
            self._signal(signal.SIGKILL)

"""Processes that are found again with all they started, by a mark in their environment, or that
stand still for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from benchmarks.server import START_TIMEOUT_S

END_S = 20.0
"""``hdserve serve`` promises 10 s; a machine that runs other tests gets more."""


@contextmanager
def started(
    log: Path, *command: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that writes to ``log``, and the mark that its environment and that of all its
    children carries."""
    mark = f"HDSERVE_TEST={uuid4().hex}"
    name, _, value = mark.partition("=")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **variables, name: value},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process, mark
        finally:
            for pid in family(mark):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def family(mark: str) -> list[int]:
    """The processes that carry ``mark``."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:
            continue
    return found


def wait_until_gone(mark: str) -> None:
    deadline = time.monotonic() + END_S
    while family(mark):
        assert time.monotonic() < deadline, family(mark)
        time.sleep(0.05)


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """The process, which is stopped meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def hdserve(*arguments: str) -> str:
    """A program that is the command."""
    return f"import sys; sys.argv[1:] = {arguments!r}; from hdserve.cli import main; main()"


def wait_for(text: str, log: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)

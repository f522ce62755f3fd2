"""Commands that are interrupted as a user does it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

START_TIMEOUT_S = 180.0


def units(journal: Path) -> dict[str, Any]:
    """The finished units of a journal, whose last line may still be written."""
    if not journal.exists():
        return {}
    whole = journal.read_text(encoding="utf-8").split("\n")[:-1]
    lines = [json.loads(line) for line in whole]
    return {line["unit"]: line["result"] for line in lines if "unit" in line}


def interrupt_after(num_units: int, journal: Path, *arguments: str) -> str:
    """Run ``hdserve``, and interrupt it once so many units are done."""
    return interrupt_when(lambda: len(units(journal)) >= num_units, *arguments)


def interrupt_when(is_time: Callable[[], bool], *arguments: str) -> str:
    """Run ``hdserve`` with as many threads as this process has, send SIGINT when it is time; what
    it says on standard error."""
    command = [sys.executable, "-c", "from hdserve.cli import main; main()", *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interruptions,
    ) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while not is_time():
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=START_TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 130, told
    return told


def heed_interruptions() -> None:
    """Also where the tests run in the background of a shell, which ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def traced(trace: Callable[..., Any]) -> Iterator[None]:
    """Within it Python calls ``trace``, as after ``sys.settrace(trace)``."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupted_at(
    number: int, calls: Iterator[int], function: Callable[..., object]
) -> Callable[..., object]:
    """``function``, interrupted instead of its call of this number, as ``calls`` counts them."""

    def call(*arguments: object, **options: object) -> object:
        if next(calls) == number:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    return call

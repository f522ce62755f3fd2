"""The process in which a grammar is tried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hdserve import grammar
from hdserve.engine.structured_output import trial


def test_it_has_limits() -> None:
    """Of processor time and of memory."""
    program = (
        "import resource, runpy, sys\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
        "print(resource.getrlimit(resource.RLIMIT_CPU), resource.getrlimit(resource.RLIMIT_AS))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, trial.__file__, "1000"],
        input=grammar.regex("a"),
        capture_output=True,
        text=True,
        check=True,
    )
    _, limits = done.stdout.splitlines()
    most_s, most_bytes = trial.MAX_CPU_S, trial.MAX_MEMORY_BYTES
    assert limits == f"{(most_s, most_s)} {(most_bytes, most_bytes)}"


def test_an_interruption_from_the_terminal_does_not_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread than the one that is interrupted may wait for it, and would take its end for
    that of a grammar that is too complex."""
    program = tmp_path / "program.py"
    program.write_text("import os; print(int(os.getpgrp() == os.getpid()))")
    monkeypatch.setattr(trial, "__file__", str(program))
    assert trial.memory_bytes("", 1) == 1


def test_a_trial_that_is_ended_from_outside_says_nothing_of_its_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    monkeypatch.setattr(trial, "__file__", str(program))
    with pytest.raises(RuntimeError, match="could not be tried: status -15"):
        trial.memory_bytes("", 1)

"""A command that is interrupted before it has begun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interruption import heed_interruptions

COMMAND = "from hdserve.cli import main; main()"
INTERRUPTION = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"


@pytest.mark.parametrize("library", ["pydantic", "typer"])
def test_an_interruption_while_it_is_imported_ends_it_quietly(tmp_path: Path, library: str) -> None:
    """A library that is the first one of ``hdserve``, and of its commands, to be imported: it takes
    a second until all are."""
    (tmp_path / f"{library}.py").write_text(INTERRUPTION)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "--version"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=heed_interruptions,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

"""Where figures were measured."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from hdserve.bench import environment


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_commit_is_that_of_the_package(tmp_path: Path) -> None:
    """Not that of another project, in whose directory its environment is."""

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", *identity, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=own, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    own |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    packages = tmp_path / ".venv" / "lib"
    packages.mkdir(parents=True)
    copy = packages / "environment.py"
    shutil.copy(environment.__file__, copy)
    spec = importlib.util.spec_from_file_location("copied_environment", copy)
    assert spec is not None
    assert spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    git("init", "--quiet")
    git("add", ".gitignore")
    git("commit", "--quiet", "--message", "a")
    assert copied.commit() == f"version {version('hdserve')}"
    git("add", str(copy))
    git("commit", "--quiet", "--message", "b")
    assert copied.commit() == git("describe", "--always")
    copy.write_text(copy.read_text() + "\n")
    assert copied.commit() == git("describe", "--always") + "-dirty"

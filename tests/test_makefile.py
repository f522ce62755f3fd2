"""``make setup``, with a stand-in for Python that only notes what it is called with."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CPU, CUDA = "https://example.org/whl/cpu", "https://example.org/whl/cu130"
OF_MAKE = {"TORCH_INDEX", "MAKEFLAGS", "MFLAGS", "GNUMAKEFLAGS", "MAKELEVEL"}
"""What a ``make test`` around the tests says."""

TORCH = next(
    line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch==")
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone with an environment whose Python notes its arguments, and succeeds."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >>called\n')
    python.chmod(0o755)
    return tmp_path


def set_up(checkout: Path, index: str = "") -> list[str]:
    """What ``make setup`` has pip install of PyTorch, and from where."""
    called = checkout / "called"
    called.write_text("")
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    command = ["make", "setup", *([f"TORCH_INDEX={index}"] if index else [])]
    subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
    installed = [line for line in called.read_text().splitlines() if f" {TORCH}" in line]
    return [line.rpartition(" constraints.txt ")[2] for line in installed]


def test_another_build_of_torch_replaces_the_one_that_is_installed(checkout: Path) -> None:
    """By force: to pip, each satisfies the version of the other.  The environment may be of before
    builds could be switched, with no note of the index."""
    assert set_up(checkout) == [TORCH]
    for index in (CUDA, CPU):
        forced, *others = set_up(checkout, index)
        assert forced == f"--force-reinstall --no-deps {TORCH} --index-url {index}"
        assert others == [f"{TORCH} --extra-index-url {index}"]


def test_nothing_is_installed_again(checkout: Path) -> None:
    """With the same index, or without one, which leaves the build as it is."""
    set_up(checkout, CUDA)
    assert set_up(checkout, CUDA) == set_up(checkout) == []


def test_new_versions_come_from_the_index_that_was_chosen(checkout: Path) -> None:
    set_up(checkout, CUDA)
    stamp = checkout / ".venv" / ".installed-stamp"
    os.utime(stamp, (0, 0))
    assert set_up(checkout) == [
        f"--no-deps {TORCH} --index-url {CUDA}",
        f"{TORCH} --extra-index-url {CUDA}",
    ]


def test_an_environment_without_pip_is_made_again(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there was no ensurepip, or it was interrupted; the build of torch stays the one that
    was chosen."""
    set_up(checkout, CUDA)
    make_environments(checkout, monkeypatch)
    python = checkout / ".venv" / "bin" / "python"
    for _ in range(2):
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
        (checkout / ".venv" / ".installed-stamp").unlink()
        assert set_up(checkout) == [
            f"--no-deps {TORCH} --index-url {CUDA}",
            f"{TORCH} --extra-index-url {CUDA}",
        ]


def test_an_environment_of_another_directory_is_made_again(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its commands would run what is there, or nothing."""
    set_up(checkout, CUDA)
    moved = checkout.rename(tmp_path_factory.mktemp("new") / "checkout")
    make_environments(moved, monkeypatch)
    assert set_up(moved) == [
        f"--no-deps {TORCH} --index-url {CUDA}",
        f"{TORCH} --extra-index-url {CUDA}",
    ]
    assert set_up(moved) == []


def test_an_environment_that_another_directory_has_a_link_to_stays(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    set_up(checkout)
    other = tmp_path_factory.mktemp("other")
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, other)
    (other / ".venv").symlink_to(checkout / ".venv")
    set_up(other)
    make_environments(checkout, monkeypatch)
    kept = checkout / ".venv" / "kept"
    kept.touch()
    set_up(checkout)
    assert kept.exists()


def make_environments(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``venv`` replace the environment with a new one of the same kind."""
    shutil.copy(checkout / ".venv" / "bin" / "python", checkout / "whole")
    maker = checkout / "python"
    maker.write_text('#!/bin/sh\nrm -r "$4" && mkdir -p "$4/bin" && cp whole "$4/bin/python"\n')
    maker.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(maker))

"""A result is written whole."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hdserve.cli.whole_file import write_whole
from hdserve.errors import ConfigError
from hdserve.journal import Journal


def test_a_file_is_replaced(tmp_path: Path) -> None:
    """With its permissions, and where a link leads; nothing is left beside it."""
    path, link = tmp_path / "result.json", tmp_path / "link.json"
    write_whole(path, "old")
    path.chmod(0o600)
    link.symlink_to(path)
    write_whole(link, "new")
    assert path.read_text() == "new"
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert {item.name for item in tmp_path.iterdir()} == {"result.json", "link.json"}


def test_what_is_interrupted_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["result.json"]


def test_a_power_failure_leaves_the_result_or_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is on the disk itself, under its name, before the journal is deleted."""
    path, done = tmp_path / "result.json", []
    journal = Journal(path, {})

    def noted(owner: Any, name: str, told: Callable[[Any], str]) -> None:
        call = getattr(owner, name)

        def note(first: Any, *others: Any, **options: Any) -> Any:
            done.append(f"{name} {told(first)}")
            return call(first, *others, **options)

        monkeypatch.setattr(owner, name, note)

    def kind(descriptor: int) -> str:
        return "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"

    noted(os, "fsync", kind)
    noted(Path, "replace", lambda _: "file")
    noted(Path, "unlink", lambda found: "journal" if found == journal.path else "rest")
    write_whole(path, "text")
    journal.finish()
    done.remove("unlink rest")
    assert done == ["fsync file", "replace file", "fsync directory", "unlink journal"]


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "text")
    reader.join()
    assert found == ["text"]
    assert pipe.is_fifo()


def test_a_place_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_whole(tmp_path / "none" / "result.json", "text")

"""A result is written whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hdserve.cli.whole_file import write_whole
from hdserve.errors import ConfigError


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

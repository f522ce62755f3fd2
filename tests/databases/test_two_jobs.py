"""Two jobs do not write one statistics database at a time."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hdserve.cli.commands import app
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_build import StatisticsBuild
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_info import CHECKPOINT_NAME, INFO_NAME, is_unfinished
from hdserve.databases.statistics_merge import StatisticsMerge
from hdserve.errors import DatabaseError
from tests.databases.byte_tokens import Bytes
from tests.databases.stored import without_locks


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": "abc"}) + "\n")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    builder = StatisticsBuilder("t", 100, max_bytes=1 << 20)
    builder.add("corpus", [5, 6, 7])
    builder.write(tmp_path / "source")
    return tmp_path / "source"


def test_the_second_job_is_refused_at_once(tmp_path: Path, corpus: Path, source: Path) -> None:
    """Whatever kind they are of; the first one ends as if there had been no second one."""
    target = tmp_path / "target"

    def begin_others(path: Path, position: int, num_tokens: int) -> None:
        with pytest.raises(DatabaseError, match="target: is being written by another job"):
            StatisticsBuild(target, (corpus,), Bytes(), 300)
        with pytest.raises(DatabaseError, match="target: is being written by another job"):
            StatisticsMerge(target, [source])
        files = {path.relative_to(target) for path in target.rglob("*")}
        assert files
        assert all(map(is_unfinished, files))

    StatisticsBuild(target, (corpus,), Bytes(), 300, on_progress=begin_others).run()
    assert StatisticsDatabase.open(target).info.num_tokens == 3
    StatisticsMerge(target, [source]).run()
    assert StatisticsDatabase.open(target).info.tokenizer == "t"
    assert not [path for path in target.iterdir() if is_unfinished(path.relative_to(target))]


def test_the_command_says_so(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    first = StatisticsMerge(target, [source])
    command = ["statistics", "merge", str(source), "--output", str(target)]
    with pytest.raises(DatabaseError, match="is being written by another job"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    first.run()
    assert CliRunner().invoke(app, command).exit_code == 0


def test_a_volume_without_locks_takes_a_job(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after one that was killed there; no lock stays behind."""
    target = tmp_path / "target"
    target.mkdir()
    (target / f"{CHECKPOINT_NAME}.lock").touch()
    monkeypatch.setattr(fcntl, "flock", without_locks)
    StatisticsMerge(target, [source]).run()
    assert not [path for path in target.iterdir() if is_unfinished(path.relative_to(target))]


def test_a_job_that_fails_is_in_nobodys_way(tmp_path: Path, corpus: Path, source: Path) -> None:
    """While it begins, and later."""
    target = tmp_path / "target"

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StatisticsMerge(target, [source, source], checkpoint_s=0.0, on_progress=stop).run()
    with pytest.raises(DatabaseError, match="other inputs"):
        StatisticsMerge(target, [source])
    StatisticsMerge(target, [source, source]).run()
    assert (target / INFO_NAME).exists()

"""What a long job keeps, and how it goes on."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from hdserve.errors import ConfigError
from hdserve.journal import Journal, digest_of_list, file_digest

SETTINGS = {"model": "a", "sizes": (1, 4)}


def never() -> Any:
    raise AssertionError("this unit was done before")


def test_finished_units_are_not_done_again(tmp_path: Path) -> None:
    """A result is the same whether it was restored or not; the job counts its interruptions."""
    journal = Journal(tmp_path / "out.json", SETTINGS)
    first = journal.once("a", lambda: {1: (2, 3), "é": None})
    assert first == {"1": [2, 3], "é": None}
    for number in (1, 2):
        journal = Journal(tmp_path / "out.json", SETTINGS)
        assert (journal.num_restored, journal.num_interruptions) == (1, number)
        assert journal.once("a", never) == first
    assert journal.once("b", lambda: 5) == journal["b"] == 5
    assert journal["a"] == first
    assert "b" in Journal(tmp_path / "out.json", SETTINGS)
    journal.finish()
    assert list(tmp_path.iterdir()) == []
    assert Journal(tmp_path / "out.json", SETTINGS).num_restored == 0


def test_what_is_told_of_an_unfinished_unit_is_kept_for_it(tmp_path: Path) -> None:
    """It is no unit: other settings still take its place."""
    Journal(tmp_path / "out.json", SETTINGS).note("a", 3)
    Journal(tmp_path / "out.json", SETTINGS).note("a", [4])
    journal = Journal(tmp_path / "out.json", SETTINGS)
    assert (journal.notes, journal.num_restored) == ({"a": [4]}, 0)
    assert Journal(tmp_path / "out.json", {}).notes == {}


def test_every_cut_of_the_file_goes_on(tmp_path: Path) -> None:
    """Whatever an interruption left of the last line, whole lines before it are kept."""
    whole = Journal(tmp_path / "whole", SETTINGS)
    for number in range(3):
        whole.once(f"unit {number}", lambda number=number: "é" * number)  # type: ignore[misc]
    assert whole.path is not None
    data = whole.path.read_bytes()
    for size in range(len(data) + 1):
        path = tmp_path / f"{size}.unfinished"
        path.write_bytes(data[:size])
        journal = Journal(tmp_path / f"{size}", SETTINGS)
        assert journal.num_restored == max(0, data[:size].count(b"\n") - 1)
        for number in range(3):
            expected = "é" * number
            assert journal.once(f"unit {number}", lambda text=expected: text) == expected  # type: ignore[misc]
        assert Journal(tmp_path / f"{size}", SETTINGS).num_restored == 3


def test_other_settings_are_refused(tmp_path: Path) -> None:
    """The error says which, and the finished units stay."""
    Journal(tmp_path / "out", SETTINGS).once("a", lambda: 1)
    with pytest.raises(ConfigError, match=r'model was "a", is "b".*finish or delete'):
        Journal(tmp_path / "out", {**SETTINGS, "model": "b"})
    assert Journal(tmp_path / "out", SETTINGS).once("a", never) == 1


def test_a_setting_that_an_earlier_version_did_not_have_is_as_one_that_is_not_set(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.json"
    Journal(path, {"a": 1}).once("unit", lambda: "kept")
    assert Journal(path, {"a": 1, "b": None}).once("unit", lambda: "new") == "kept"


def test_other_settings_without_results_give_way(tmp_path: Path) -> None:
    """A job that failed before it had done anything is in nobody's way."""
    for settings in (SETTINGS, {**SETTINGS, "model": "b"}):
        journal = Journal(tmp_path / "out", settings)
        assert (journal.num_restored, journal.num_interruptions) == (0, 0)
    journal.once("a", lambda: 1)
    assert Journal(tmp_path / "out", {**SETTINGS, "model": "b"}).once("a", never) == 1


@pytest.mark.parametrize("text", ["{\n", "3\n", '"a"\n', '{"settings": 3}\n'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "out.unfinished").write_text(text)
    with pytest.raises(ConfigError, match="delete it"):
        Journal(tmp_path / "out", SETTINGS)
    assert (tmp_path / "out.unfinished").read_text() == text


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """It is told before the work, not after it."""
    with pytest.raises(ConfigError, match="cannot be read and written"):
        Journal(tmp_path / "none" / "out", SETTINGS)


@contextmanager
def files_no_longer_than(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """It is told as any other that cannot be written, not in a traceback, and what was finished is
    there when the job goes on, even while the disk is still full."""
    journal = Journal(tmp_path / "out", SETTINGS)
    journal.once("a", lambda: "x" * 1000)
    assert journal.path is not None
    whole = journal.path.read_bytes()
    with files_no_longer_than(len(whole) + 5):
        with pytest.raises(ConfigError, match=r"out\.unfinished: cannot be written: "):
            journal.once("b", lambda: 1)
        assert "b" not in journal
        with pytest.raises(ConfigError, match=r"out\.unfinished: cannot be written: "):
            Journal(tmp_path / "out", SETTINGS)
    assert journal.path.read_bytes().startswith(whole)
    assert Journal(tmp_path / "out", SETTINGS).once("a", never) == "x" * 1000


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """A second run of a command says that the first is at it, and harms nothing; when that has
    ended it goes on."""
    journal = Journal(tmp_path / "out", SETTINGS)
    journal.once("a", lambda: 1)
    script = (
        "import sys; from pathlib import Path; from hdserve.journal import Journal\n"
        f"print(Journal(Path(sys.argv[1]), {SETTINGS!r}).num_restored)"
    )

    def run_beside() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, str(tmp_path / "out")]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert "another process is doing this job" in run_beside().stderr
    journal.once("b", lambda: 2)
    del journal
    assert run_beside().stdout == "2\n"


def test_without_a_result_file_nothing_is_kept() -> None:
    journal = Journal(None, SETTINGS)
    assert journal.once("a", lambda: (1,)) == [1]
    assert journal.once("a", never) == [1]
    journal.finish()


def test_digests_follow_contents(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text(json.dumps([1]))
    other.write_text(json.dumps([1]))
    assert file_digest(one) == file_digest(other)
    other.write_text(json.dumps([2]))
    assert file_digest(one) != file_digest(other)
    assert file_digest(None) is None
    with pytest.raises(ConfigError, match="cannot read"):
        file_digest(tmp_path / "none")


def test_what_can_be_read_once_has_no_digest(tmp_path: Path) -> None:
    """A pipe, as in ``--fill <(zcat ...)``, would be empty for the job; nobody waits for it."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(ConfigError, match=r"cannot be read twice; write .* to a file"):
            file_digest(path)


def test_file_names_that_are_not_utf_8(tmp_path: Path) -> None:
    """They are settings like others."""
    settings = {"prompts": os.fsdecode(b"\xff.jsonl")}
    Journal(tmp_path / "out", settings).once("a", lambda: 1)
    assert Journal(tmp_path / "out", settings).once("a", never) == 1
    with pytest.raises(ConfigError, match=r'is "other"'):
        Journal(tmp_path / "out", {"prompts": "other"})


@pytest.mark.parametrize("values", [[], [{"a": "é", "b": [1, 2]}], [{"a": 1}, "b", None, 1.5]])
def test_a_list_has_the_digest_of_its_text(values: list[Any]) -> None:
    """Though it is never whole."""
    text = json.dumps(values)
    assert digest_of_list(iter(values)) == sha256(text.encode()).hexdigest()[:16]

"""How often a database was opened is remembered, also where a disk is full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hdserve.databases.generation_file import GenerationFile
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import SnapshotError
from tests.databases.stored import KEY


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of 64 KiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "hdserve-test", str(directory)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system cannot be mounted here: {error}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte."""
    with open(disk / "others", "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))
    assert os.statvfs(disk).f_bavail == 0


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = GenerationFile(tmp_path, KEY)
    assert file.read() == (0, ())
    file.write(1, ["a"])
    file.write(2, ["a", "b"])
    assert GenerationFile(tmp_path, KEY).read() == (2, ("a", "b"))
    with pytest.raises(SnapshotError, match="of the model 'a-model'"):
        GenerationFile(tmp_path, DatabaseKey("b-model", KEY.fingerprint)).read()


def test_the_newest_epochs_are_kept(tmp_path: Path) -> None:
    file = GenerationFile(tmp_path, KEY)
    file.write(1, [f"{number:032}" for number in range(100)])
    _, epochs = file.read()
    assert epochs[-1] == f"{99:032}"
    assert len(epochs) == 64


def test_a_full_disk_takes_run_after_run(disk: Path) -> None:
    """Each leaves room for the next."""
    file = GenerationFile(disk, KEY)
    file.write(1, ["a"])
    fill(disk)
    for number in range(2, 6):
        file.write(number, ["a", f"{number:032}"])
        assert GenerationFile(disk, KEY).read() == (number, ("a", f"{number:032}"))
    (disk / "others").unlink()
    file.write(6, ["c"])
    assert file.read() == (6, ("c",))


def test_a_disk_that_was_always_full_takes_none(disk: Path) -> None:
    fill(disk)
    file = GenerationFile(disk, KEY)
    with pytest.raises(OSError, match="No space left on device"):
        file.write(1, ["a"])
    assert file.read() == (0, ())
    assert [path.name for path in disk.iterdir()] == ["others"]


def test_more_than_there_is_room_for_leaves_what_was_there(disk: Path) -> None:
    file = GenerationFile(disk, KEY)
    file.write(1, ["a"])
    fill(disk)
    with pytest.raises(OSError, match="No space left on device"):
        file.write(2, ["b" * 5000])
    assert file.read() == (1, ("a",))


def test_a_spare_file_that_was_cut_is_made_anew(disk: Path) -> None:
    """As by a kill before it took the other's name."""
    file = GenerationFile(disk, KEY)
    file.write(1, ["a"])
    (disk / "generation.spare").write_bytes(b"short")
    file.write(2, ["a", "b"])
    fill(disk)
    file.write(3, ["a", "b", "c"])
    assert file.read() == (3, ("a", "b", "c"))

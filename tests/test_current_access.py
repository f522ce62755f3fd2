"""Keys that change in their files count at once, and files that are broken change nothing."""

from __future__ import annotations

import os
import pickle
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hdserve import current_access
from hdserve.access import Identity, read_access
from hdserve.config import AccessConfig
from hdserve.current_access import CurrentAccess
from hdserve.errors import Unauthorized
from tests.waiting import eventually

OLD, NEW, ADMIN = "the-old-key-0123456", "the-new-key-0123456", "admin-key-0123456"


def current(directory: Path) -> CurrentAccess:
    config = AccessConfig(api_keys_file=directory / "keys", admin_key_file=directory / "admin")
    access = pickle.loads(pickle.dumps(read_access(config)))
    return CurrentAccess(access, check_interval_s=0)


def accepts(access: CurrentAccess, key: str) -> bool:
    try:
        access.identify(f"Bearer {key}")
    except Unauthorized:
        return False
    return True


def test_keys_come_and_go(tmp_path: Path) -> None:
    """Those of a file that is written anew, with their namespaces, and the administrator's."""
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text(OLD)
    access = current(tmp_path)
    assert [accepts(access, key) for key in (OLD, NEW, ADMIN)] == [True, False, False]
    keys.write_text(f"{OLD}\n{NEW} team\n")
    assert access.identify(f"Bearer {NEW}") == Identity("team")
    assert accepts(access, OLD)
    keys.write_text(f"{NEW} team\n")
    admin.write_text(f"{ADMIN}\n")
    assert [accepts(access, key) for key in (OLD, NEW)] == [False, True]
    assert access.identify(f"Bearer {ADMIN}").is_admin
    admin.unlink()
    assert not accepts(access, ADMIN)


def test_keys_change_with_links(tmp_path: Path) -> None:
    """As Kubernetes replaces the files of a secret: a link to the directory is renamed."""
    for version, key in (("1", OLD), ("2", NEW)):
        directory = tmp_path / version
        directory.mkdir()
        (directory / "keys").write_text(key)
        os.utime(directory / "keys", ns=(0, 0))
    (tmp_path / "data").symlink_to("1")
    (tmp_path / "keys").symlink_to("data/keys")
    access = current(tmp_path)
    assert [accepts(access, key) for key in (OLD, NEW)] == [True, False]
    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").rename(tmp_path / "data")
    assert [accepts(access, key) for key in (OLD, NEW)] == [False, True]


def test_a_process_that_starts_later_knows_the_keys_of_now(tmp_path: Path) -> None:
    """What was read when the application was built is only where it begins."""
    (tmp_path / "keys").write_text(OLD)
    access = current(tmp_path)
    (tmp_path / "keys").write_text(NEW)
    assert [accepts(access, key) for key in (OLD, NEW)] == [False, True]


@pytest.mark.parametrize("broken", ["", "short", f"{NEW} a b", f"{NEW}\n{NEW}", ADMIN, "\udcff"])
def test_broken_files_keep_the_old_keys(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is locked out and nobody let in; the log says so once, without a key, and a file that
    is mended counts."""
    keys = tmp_path / "keys"
    keys.write_text(OLD)
    (tmp_path / "admin").write_text(ADMIN)
    access = current(tmp_path)
    assert accepts(access, OLD)
    keys.write_bytes(broken.encode(errors="surrogateescape"))
    for _ in range(3):
        assert [accepts(access, key) for key in (OLD, NEW, ADMIN)] == [True, False, True]
    (record,) = (item for item in caplog.records if item.levelname == "ERROR")
    assert "the keys stay as they were" in record.getMessage()
    assert not any(key in record.getMessage() for key in (OLD, NEW, ADMIN))
    keys.unlink()
    assert [accepts(access, key) for key in (OLD, NEW, ADMIN)] == [True, False, True]
    keys.write_text(f"{NEW}\n")  # of another size than the old ones, whatever the clock of the disk
    assert [accepts(access, key) for key in (OLD, NEW, ADMIN)] == [False, True, True]


@contextmanager
def no_file_can_be_opened() -> Iterator[None]:
    """Though each can be looked at, as with one that belongs to somebody else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_could_not_be_read_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be readable later without any other change; the log says each time once that it was
    not."""
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    for path, old, new in ((keys, OLD, f"{NEW}-longer"), (admin, ADMIN, f"{ADMIN}-longer")):
        keys.write_text(OLD)
        admin.write_text(ADMIN)
        access = current(tmp_path)
        assert accepts(access, old)
        caplog.clear()
        path.write_text(new)
        with no_file_can_be_opened():
            for _ in range(3):
                assert [accepts(access, key) for key in (old, new)] == [True, False]
        assert [accepts(access, key) for key in (old, new)] == [False, True]
        path.write_text(old)
        with no_file_can_be_opened():
            assert [accepts(access, key) for key in (old, new)] == [False, True]
        assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_files_on_a_disk_that_hangs_keep_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The keys are in memory; the log says once that they are old, and those of the files count
    when the disk is back."""
    (tmp_path / "keys").write_text(OLD)
    access = current(tmp_path)
    assert accepts(access, OLD)
    (tmp_path / "keys").write_text(NEW)
    is_back, state = threading.Event(), current_access._state

    def hang(path: Path) -> Any:
        is_back.wait()
        return state(path)

    monkeypatch.setattr(current_access, "_state", hang)
    monkeypatch.setattr(current_access, "_MAX_WAIT_S", 0.0)
    monkeypatch.setattr(current_access, "_LATE_S", 0.0)
    for _ in range(3):
        assert [accepts(access, key) for key in (OLD, NEW)] == [True, False]
    assert caplog.text.count("the keys stay as they were") == 1
    is_back.set()
    eventually(lambda: accepts(access, NEW))
    assert not accepts(access, OLD)


def test_a_file_that_seems_as_old_as_before_is_read(tmp_path: Path) -> None:
    """Whoever sets its time, or who may read it, changes it."""
    keys = tmp_path / "keys"
    keys.write_text(OLD)
    before = keys.stat()
    access = current(tmp_path)
    assert accepts(access, OLD)
    while keys.stat().st_ctime_ns == before.st_ctime_ns:
        keys.write_text(NEW)
        os.utime(keys, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [accepts(access, key) for key in (OLD, NEW)] == [False, True]


def test_files_are_not_looked_at_for_every_request(tmp_path: Path) -> None:
    """Within the interval the keys are those of the last look."""
    (tmp_path / "keys").write_text(OLD)
    config = AccessConfig(api_keys_file=tmp_path / "keys")
    access = CurrentAccess(read_access(config), check_interval_s=1e6)
    assert accepts(access, OLD)
    (tmp_path / "keys").write_text(NEW)
    assert [accepts(access, key) for key in (OLD, NEW)] == [True, False]

"""Keys are read strictly, compared whole, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from hdserve.access import Access, Identity, read_access
from hdserve.config import AccessConfig
from hdserve.errors import ConfigError, Unauthorized

KEY, OTHER, ADMIN = "a-key-of-sixteen-characters", "another-key-0123456", "admin-key-0123456"


def access_of(directory: Path, text: str, admin: str | None = ADMIN) -> Access:
    path = directory / "keys"
    path.write_text(text)
    secret = None if admin is None else SecretStr(admin)
    return read_access(AccessConfig(api_keys_file=path, admin_key=secret))


def test_keys_have_namespaces(tmp_path: Path) -> None:
    """A key without one has the default; several may share one; comments are no keys."""
    access = access_of(
        tmp_path, f"# comment\n\n{KEY}\n{OTHER} team.b-1\nthird-key-0123456\tteam.b-1"
    )
    assert access.identify(f"Bearer {KEY}") == Identity("default")
    assert access.identify(f"bearer  {OTHER} ") == Identity("team.b-1")
    assert access.identify("Bearer third-key-0123456") == Identity("team.b-1")
    assert access.identify(f"Bearer {ADMIN}") == Identity("default", is_admin=True)


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    """Whether a comment follows it or a key."""
    keys, admin = tmp_path / "keys", tmp_path / "admin-key"
    config = AccessConfig(api_keys_file=keys, admin_key_file=admin)
    admin.write_text(f"{ADMIN}\n", encoding="utf-8-sig")
    for text in (f"# keys\n{KEY}\n", f"{KEY}\n"):
        keys.write_text(text, encoding="utf-8-sig")
        access = read_access(config)
        assert access.identify(f"Bearer {KEY}") == Identity()
        assert access.identify(f"Bearer {ADMIN}").is_admin


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer é",
    ],
)
def test_wrong_keys(tmp_path: Path, authorization: str) -> None:
    """Anything but a whole key is refused, and not repeated."""
    with pytest.raises(Unauthorized) as caught:
        access_of(tmp_path, f"{KEY}\n").identify(authorization)
    assert KEY[:8] not in caught.value.message


def test_without_keys_everybody_may_generate_and_nobody_administer() -> None:
    """The administrator needs a key even then."""
    assert Access().identify("") == Identity()
    assert Access().identify(f"Bearer {KEY}") == Identity()
    closed = read_access(AccessConfig(admin_key=SecretStr(ADMIN)))
    assert closed.identify(f"Bearer {ADMIN}").is_admin
    assert not closed.identify(f"Bearer {KEY}").is_admin


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("short", "line 1: a key needs at least 16"),
        (f"{KEY}é", "line 1: a key consists of ASCII"),
        (f"{KEY} a b", "line 1: a key and its namespace"),
        (f"# x\n{KEY} ../etc", "line 2: a namespace consists of"),
        (f"{KEY} {'a' * 65}", "line 1: a namespace consists of 1 to 64 letters"),
        (f"{KEY}\n{KEY} b", "twice"),
        (ADMIN, "administrator is among"),
        ("# nothing\n", "holds no API key"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    """The line is named, its content is not."""
    with pytest.raises(ConfigError) as caught:
        access_of(tmp_path, text)
    assert reason in caught.value.message
    assert KEY not in caught.value.message
    assert ADMIN not in caught.value.message


def test_unreadable_files_and_short_admin_keys(tmp_path: Path) -> None:
    """A configuration that cannot be held starts nothing."""
    with pytest.raises(ConfigError, match=r"cannot read .*/none: No such file or directory$"):
        read_access(AccessConfig(api_keys_file=tmp_path / "none"))
    (tmp_path / "keys").write_bytes(KEY.encode() + b"\xff")
    with pytest.raises(ConfigError, match=r"cannot read .*/keys: not UTF-8 text$"):
        read_access(AccessConfig(api_keys_file=tmp_path / "keys"))
    for wrong in ("", "short", f"{ADMIN}é"):
        with pytest.raises(ConfigError, match=r"^access\.admin_key or HDSERVE_ADMIN_KEY: a key "):
            read_access(AccessConfig(admin_key=SecretStr(wrong)))


def test_keys_are_not_in_what_is_kept(tmp_path: Path) -> None:
    """Neither digests nor configuration show a key."""
    access = access_of(tmp_path, f"{KEY}\n")
    assert KEY not in repr(access)
    assert ADMIN not in repr(access)
    assert ADMIN not in repr(AccessConfig(admin_key=SecretStr(ADMIN)))


def test_white_space_around_the_administrators_key_is_no_part_of_it(tmp_path: Path) -> None:
    """Nor in headers, from where it is compared with it; it is still no client's key."""
    access = access_of(tmp_path, f"{KEY}\n", f" {ADMIN}\n")
    assert access.identify(f"Bearer {ADMIN}").is_admin
    with pytest.raises(ConfigError, match="administrator is among"):
        access_of(tmp_path, f"{KEY}\n", f"{KEY}\n")
    with pytest.raises(ConfigError, match="at least 16"):
        access_of(tmp_path, f"{KEY}\n", "short" + " " * 16)


def test_the_administrators_key_may_be_in_a_file(tmp_path: Path) -> None:
    """One line; without the file nobody may administer."""
    path = tmp_path / "admin-key"
    config = AccessConfig(admin_key_file=path)
    assert not read_access(config).identify(f"Bearer {ADMIN}").is_admin
    path.write_text(f"{ADMIN}\n")
    assert read_access(config).identify(f"Bearer {ADMIN}").is_admin
    name = "access.admin_key_file or HDSERVE_ADMIN_KEY_FILE: a key "
    for wrong, reason in (
        ("", f"{path}: one line"),
        ("short\n", f"{name}needs at least 16 characters"),
        (f"{ADMIN}é\n", f"{name}consists of ASCII"),
        (f"{ADMIN}\n{ADMIN}\n", f"{path}: one line"),
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigError) as caught:
            read_access(config)
        assert caught.value.message.startswith(reason)
        assert ADMIN not in caught.value.message
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"cannot read the administrator's key in .*: Is a dir"):
        read_access(config)

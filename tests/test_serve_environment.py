"""What ``hdserve serve`` adds to the environment of a cluster of its own, so that Ray starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hdserve.cli.own_cluster import directory_variables, token_variables

TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """For a token."""
    found = tmp_path / "private"
    found.mkdir()
    return found


@pytest.mark.parametrize("home", [None, "", "/dev/null", "/proc"])
def test_without_a_home_the_token_is_in_the_private_directory(
    home: str | None, directory: Path
) -> None:
    """For this user alone, and each time another."""
    environment = {"PATH": "/bin", **({} if home is None else {"HOME": home})}
    variables = token_variables(directory, environment)
    (path,) = directory.iterdir()
    assert variables == {TOKEN_PATH: str(path)}
    assert path.stat().st_mode & 0o777 == 0o600
    first = path.read_text()
    assert len(first) == 64
    token_variables(directory, environment)
    assert path.read_text() != first


@pytest.mark.parametrize("is_there", [False, True])
def test_a_home_keeps_the_token(is_there: bool, tmp_path: Path, directory: Path) -> None:
    token = tmp_path / ".ray" / "auth_token"
    if is_there:
        token.parent.mkdir()
        token.write_text("secret")
    assert token_variables(directory, {"HOME": str(tmp_path)}) == {}
    assert token.exists() is is_there
    assert not list(directory.iterdir())


@pytest.mark.parametrize(
    ("is_there", "right"), [(False, os.W_OK | os.X_OK), (True, os.R_OK)], ids=["none", "unreadable"]
)
def test_a_home_without_the_rights_keeps_none(
    is_there: bool,
    right: int,
    tmp_path: Path,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one on a file system that cannot be written, or with somebody else's token."""
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    if is_there:
        token.write_text("secret")
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != right)
    assert [*token_variables(directory, {"HOME": str(tmp_path)})] == [TOKEN_PATH]


@pytest.mark.parametrize(
    "chosen",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_TOKEN": "secret"},
        {TOKEN_PATH: "/run/secrets/token"},
    ],
)
def test_what_the_environment_chooses_holds(chosen: dict[str, str], directory: Path) -> None:
    assert token_variables(directory, chosen) == {}


@pytest.mark.parametrize(
    "chosen", [{"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_TOKEN": ""}, {TOKEN_PATH: ""}]
)
def test_what_chooses_no_token_needs_one(chosen: dict[str, str], directory: Path) -> None:
    """Ray passes over a variable that is empty."""
    assert [*token_variables(directory, chosen)] == [TOKEN_PATH]


def test_ray_has_room_for_its_sockets() -> None:
    """Of a path 107 bytes count, and Ray uses up to 72 of them; otherwise it stays where it is."""
    longest = "/" + 34 * "d"
    assert directory_variables({}) == {}
    assert directory_variables({"TMPDIR": longest}) == {}
    assert directory_variables({"TMPDIR": f"{longest}d"}) == {"RAY_TMPDIR": "/tmp"}
    assert directory_variables({"TMPDIR": f"{longest}d", "RAY_TMPDIR": "/ray"}) == {}

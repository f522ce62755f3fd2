"""The token of Ray, which lets its reader run code, is this user's alone."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.authentication.authentication_token_setup import generate_and_save_token

from deployments.own_application import OwnApplication
from deployments.ray_token import close_token
from deployments.runner import _serve
from hdserve.config.deployed import application_of


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the token is, in a home directory that is empty."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


def is_closed(path: Path) -> bool:
    return path.stat().st_mode & 0o077 == 0


def make_directory(path: Path) -> None:
    """Open to all, whatever the umask."""
    path.mkdir()
    path.chmod(0o755)


def write(token: Path, mode: int) -> None:
    make_directory(token.parent)
    token.write_text("secret")
    token.chmod(mode)


@pytest.mark.parametrize("has_directory", [False, True])
def test_a_token_that_ray_creates(has_directory: bool, token: Path) -> None:
    """Nobody else gets to the file."""
    if has_directory:
        make_directory(token.parent)
    close_token()
    generate_and_save_token()
    assert token.read_text()
    assert is_closed(token.parent)


@pytest.mark.parametrize(("mode", "left"), [(0o644, 0o600), (0o660, 0o600), (0o400, 0o400)])
def test_a_token_that_is_there(mode: int, left: int, token: Path) -> None:
    """The directory stays open, to whatever else is in it."""
    write(token, mode)
    close_token()
    assert token.stat().st_mode & 0o777 == left
    assert token.read_text() == "secret"
    assert token.parent.stat().st_mode & 0o777 == 0o755


def test_a_token_of_somebody_else(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user that may change it, too, as root may, leaves it as it is."""
    write(token, 0o644)
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    close_token()
    assert token.stat().st_mode & 0o777 == 0o644


def test_what_cannot_be_closed_is_passed_over(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token.parent.write_text("not a directory")
    close_token()
    monkeypatch.setenv("HOME", "/dev/null")
    close_token()


@pytest.mark.parametrize(("address", "is_own"), [("local", True), ("192.0.2.1:6379", False)])
def test_it_is_closed_before_a_cluster_starts(
    address: str, is_own: bool, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token of another's cluster is that one's."""

    class Started(Exception):
        pass

    def init(*_arguments: Any, **_options: Any) -> None:
        assert token.parent.exists() == is_own
        raise Started

    monkeypatch.setattr(ray, "init", init)
    path = token.parent.with_name("serve.json")
    path.write_text(json.dumps({"applications": [application_of({})]}))
    with pytest.raises(Started):
        _serve(str(path), address, OwnApplication(), ExitStack())

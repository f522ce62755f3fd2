"""Paths that begin wherever a process was started are found, and nothing that only looks like
one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdserve.config import default_config, parse_config
from hdserve.config.relative_paths import relative_paths


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every section; a directory without a dot before it is one where it is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "here").mkdir(parents=True)
    models = [
        {"name": "a", "model": "./a", "statistics": "counted", "chat_template": "chat.jinja"},
        {"name": "b", "model": "owner/here", "statistics": None},
    ]
    config = parse_config(
        {
            "models": models,
            "access": {"api_keys_file": "keys", "admin_key_file": "../admin"},
            "model_database": {"snapshot_dir": "snapshots"},
            "statistics_root": "all",
        }
    )
    assert {".".join(map(str, where)): path for where, path in relative_paths(config)} == {
        "models.0.model": "./a",
        "models.0.statistics": "counted",
        "models.0.chat_template": "chat.jinja",
        "models.1.model": "owner/here",
        "access.api_keys_file": "keys",
        "access.admin_key_file": "../admin",
        "model_database.snapshot_dir": "snapshots",
        "statistics_root": "all",
    }


def test_what_is_no_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of bundled models, also beside a directory of that name, and of the hub; the
    statistics that ship; what is absolute, or in the home directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hdserve-mini").mkdir()
    config = parse_config(
        {
            "models": [
                {"name": "a", "model": "hdserve-mini", "statistics": "bundled"},
                {"name": "b", "model": "owner/model", "statistics": "~/counted"},
                {"name": "c", "model": "/models/c", "chat_template": "/chat.jinja"},
            ],
            "access": {"api_keys_file": "/keys", "admin_key": "the-key-of-the-administrator"},
            "model_database": {"snapshot_dir": "~/snapshots"},
        }
    )
    assert [*relative_paths(config), *relative_paths(default_config())] == []

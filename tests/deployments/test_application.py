"""What the builder of the application says before anything of it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments import app
from deployments.application import AppArgs


@pytest.mark.parametrize(
    "access", [None, {}, {"admin_key": None}, {"admin_key": "sk-of-the-administrator"}]
)
def test_a_key_in_arguments_is_warned_of(
    access: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray logs them; what is said has no key in it."""
    config = {"models": [{"name": "a", "model": "hdserve-mini"}]}
    app(AppArgs(config=config if access is None else config | {"access": access}))
    has_key = bool(access and access.get("admin_key"))
    assert ("access.admin_key_file" in caplog.text) == has_key
    assert "sk-of-the-administrator" not in caplog.text


def test_the_models_are_those_of_a_file(tmp_path: Path) -> None:
    """Each has a deployment, which the gateway calls by the name that it has there."""
    path = tmp_path / "config.yaml"
    path.write_text("models:\n- {name: a, model: hdserve-mini}\n- {name: b, model: hdserve-tiny}\n")
    gateway: Any = app(AppArgs(config=str(path)))._bound_deployment
    built, models, _ = gateway.init_args
    assert [(model.name, model.model) for model in built.models] == [
        ("a", "hdserve-mini"),
        ("b", "hdserve-tiny"),
    ]
    found = {name: model._bound_deployment.init_args[0] for name, model in models.items()}
    assert found == {model.name: model for model in built.models}


LOCAL, KEYS = {"is_local": True}, "sixteen-characters-of-a-key default\n"


@pytest.mark.parametrize(
    ("arguments", "keys", "configured", "allowed"),
    [
        (LOCAL, "", None, ()),
        (LOCAL, "", ["a.example"], ("a.example",)),
        (LOCAL, "", ["*"], ("*",)),
        (LOCAL, KEYS, None, None),
        ({}, "", None, None),
        ({}, "", [], ()),
    ],
)
def test_a_local_server_without_keys_is_called_by_local_names(
    arguments: dict[str, bool],
    keys: str,
    configured: list[str] | None,
    allowed: tuple[str, ...] | None,
    tmp_path: Path,
) -> None:
    """Unless its configuration says otherwise; so is none that others may reach."""
    config: dict[str, Any] = {"models": [{"name": "a", "model": "hdserve-mini"}]}
    config["gateway"] = {"allowed_hosts": configured}
    if keys:
        (tmp_path / "keys").write_text(keys)
        config["access"] = {"api_keys_file": str(tmp_path / "keys")}
    gateway: Any = app(AppArgs(config=config, **arguments))._bound_deployment
    built, *_ = gateway.init_args
    assert built.gateway.allowed_hosts == allowed

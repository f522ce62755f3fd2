"""What the builder of the application says before anything of it runs."""

from __future__ import annotations

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

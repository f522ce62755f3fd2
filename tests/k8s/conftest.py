"""Fixtures of the manifests' tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the user of the pods can go through, as it cannot through ``tmp_path``."""
    if os.getuid() != 0:
        pytest.skip("only root can become the user of the pods")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)

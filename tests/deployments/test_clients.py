"""Clients people use, each in a process of its own: a chat, a stream and an error.

They are no dependency of the tests.  ``HDSERVE_CLIENTS_PYTHON`` names a Python that has
langchain-openai and litellm, ``HDSERVE_CLIENTS_NODE`` a directory with ``node_modules/openai``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving import ServedApplication

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-mini"
SCRIPTS = Path(__file__).parent.parent / "clients"
PYTHON = os.environ.get("HDSERVE_CLIENTS_PYTHON", sys.executable)
NODE_DIRECTORY = Path(os.environ.get("HDSERVE_CLIENTS_NODE", Path.cwd()))


def check(application: ServedApplication, command: list[str], directory: Path) -> None:
    """Run a client, and look at what it got."""
    done = subprocess.run(
        [*command, f"{application.base_url}/v1", MODEL],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(found["chat"]) > 10
    assert found["stream"] == found["chat"]
    assert found["num_pieces"] > 1  # drafts of what another client was told are long
    assert 0 < found["chat_tokens"] == found["stream_tokens"] <= 24
    assert found["error"]["status"] == 404
    assert "no-such-model" in found["error"]["message"]
    assert MODEL in found["error"]["message"]


@pytest.mark.parametrize("name", ["langchain", "litellm"])
def test_python_clients(mini_application: ServedApplication, tmp_path: Path, name: str) -> None:
    package = {"langchain": "langchain_openai", "litellm": "litellm"}[name]
    probe = f"import importlib.util as u; raise SystemExit(u.find_spec({package!r}) is None)"
    if subprocess.run([PYTHON, "-c", probe]).returncode:
        pytest.skip(f"{PYTHON} has no {package}")
    check(mini_application, [PYTHON, str(SCRIPTS / f"{name}_client.py")], tmp_path)


def test_node_client(mini_application: ServedApplication) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    if not (NODE_DIRECTORY / "node_modules" / "openai").is_dir():
        pytest.skip(f"{NODE_DIRECTORY} has no node_modules/openai")
    check(mini_application, [node, str(SCRIPTS / "openai_client.mjs")], NODE_DIRECTORY)

"""schemathesis over ``/openapi.json`` of a running server."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import ServedApplication

ROOT = Path(__file__).parents[2]
EXCLUDED = ("positive_data_acceptance", "unsupported_method", "allow_header_conformance")
"""What a schema cannot say: which ids a vocabulary has, which parameters exclude each other.  Names
of models hold slashes, so ``GET .../m/import`` asks for the model ``m/import``, and ``Allow`` names
``GET`` there."""

MODEL = "m"
ADMIN_ROUTES = "^/v1/speculation"
ADMIN_KEY = "the-key-of-the-administrator"
KEY = "a-key-of-sixteen-characters"

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
    ),
]


def test_answers_are_what_the_schema_says(tmp_path: Path) -> None:
    """No 5xx, no undocumented status, and the server is there afterwards."""
    check(tmp_path, {}, ["--exclude-path-regex", ADMIN_ROUTES])


def test_answers_to_the_administrator_are_what_the_schema_says(tmp_path: Path) -> None:
    """Databases are flushed, imported and chosen; nothing of it is done without the key."""
    keys, statistics = tmp_path / "keys", tmp_path / "statistics"
    keys.write_text(f"{KEY}\n")
    statistics.mkdir()
    fields = {
        "access": {"admin_key": ADMIN_KEY, "api_keys_file": str(keys)},
        "statistics_root": str(statistics),
    }
    authorization = f"Authorization: Bearer {ADMIN_KEY}"
    check(tmp_path, fields, ["--include-path-regex", ADMIN_ROUTES, "--header", authorization])


def check(directory: Path, fields: dict[str, Any], options: list[str]) -> None:
    """Run schemathesis against a server of its own.

    Args:
        fields: of the configuration, beside the model.
    """
    model = {"name": MODEL, "model": "hdserve-mini", "engine": {"max_model_len": 128}}
    served = ServedApplication(directory, {"models": [model], **fields})
    try:
        served.wait_ready()
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", f"{served.base_url}/openapi.json"),
            *("--max-examples", os.environ.get("HDSERVE_SCHEMATHESIS_EXAMPLES", "25")),
            *("--request-timeout", "120", "--seed", "1", "--no-color"),
            *("--exclude-checks", ",".join(EXCLUDED)),
            *options,
        ]
        hooks = {"SCHEMATHESIS_HOOKS": "tests.fuzz.openapi_hooks", "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **hooks}, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
        assert httpx.get(f"{served.base_url}/ready", timeout=60).status_code == 200
    finally:
        served.stop()

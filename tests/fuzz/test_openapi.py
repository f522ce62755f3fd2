"""schemathesis over ``/openapi.json`` of a running server."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.serving import ServedApplication

ROOT = Path(__file__).parents[2]
EXCLUDED = ("positive_data_acceptance", "unsupported_method", "allow_header_conformance")
"""What a schema cannot say: which ids a vocabulary has, which parameters exclude each other.  Names
of models hold slashes, so ``GET .../m/import`` asks for the model ``m/import``, and ``Allow`` names
``GET`` there."""

MODEL = "m"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
)
def test_answers_are_what_the_schema_says(tmp_path: Path) -> None:
    """No 5xx, no undocumented status, and the server is there afterwards."""
    engine = {"max_model_len": 128}
    config = {"models": [{"name": MODEL, "model": "hdserve-mini", "engine": engine}]}
    served = ServedApplication(tmp_path, config)
    try:
        served.wait_ready()
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", f"{served.base_url}/openapi.json"),
            *("--max-examples", os.environ.get("HDSERVE_SCHEMATHESIS_EXAMPLES", "25")),
            *("--request-timeout", "120", "--seed", "1", "--no-color"),
            *("--exclude-checks", ",".join(EXCLUDED)),
        ]
        hooks = {"SCHEMATHESIS_HOOKS": "tests.fuzz.openapi_hooks", "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **hooks}, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
        assert httpx.get(f"{served.base_url}/ready", timeout=60).status_code == 200
    finally:
        served.stop()

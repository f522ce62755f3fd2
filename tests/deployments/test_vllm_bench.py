"""vLLM's own load client, as it is, against the gateway.

It is no dependency of the tests: ``HDSERVE_CLIENTS_VLLM`` names an executable ``vllm``, and ``vllm
bench serve --help`` works there; no accelerator is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hdserve.models import resolve_model
from tests.serving import ServedApplication

VLLM = os.environ.get("HDSERVE_CLIENTS_VLLM", "")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM, reason="HDSERVE_CLIENTS_VLLM names no vllm"),
]

MODEL = "hdserve-mini"
NUM_PROMPTS = 16
NUM_OUTPUT_TOKENS = 32
ITS_OWN = {
    *("date", "backend", "endpoint_type", "label", "model_id", "tokenizer_id", "rtfx"),
    *("latencies", "queue_times"),  # of what is no text
}


def load(application: ServedApplication, directory: Path, *options: str) -> dict[str, Any]:
    """What ``vllm bench serve`` writes."""
    command = [VLLM, "bench", "serve", "--base-url", application.base_url, "--model", MODEL]
    command += ["--tokenizer", resolve_model(MODEL), "--temperature", "0"]
    command += ["--dataset-name", "random", "--random-input-len", "48"]
    command += ["--random-output-len", str(NUM_OUTPUT_TOKENS)]
    command += ["--num-prompts", str(NUM_PROMPTS), "--max-concurrency", "4", "--save-result"]
    command += ["--result-dir", str(directory), "--result-filename", "vllm.json", *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((directory / "vllm.json").read_text())
    return found


@pytest.mark.parametrize(
    "options",
    [(), ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")],
    ids=["completions", "chat"],
)
def test_every_request_is_answered_whole(
    mini_application: ServedApplication, tmp_path: Path, options: tuple[str, ...]
) -> None:
    found = load(mini_application, tmp_path, *options)
    assert found["completed"] == NUM_PROMPTS
    assert found["failed"] == 0
    assert found["total_output_tokens"] == NUM_PROMPTS * NUM_OUTPUT_TOKENS
    assert 0 < found["spec_decode_accepted_tokens"] <= found["spec_decode_draft_tokens"]
    accepted = found["spec_decode_accepted_tokens"] / found["spec_decode_num_drafts"]
    assert found["spec_decode_acceptance_length"] == pytest.approx(1 + accepted)
    assert sum(found["spec_decode_per_position_acceptance_rates"]) == pytest.approx(accepted)


def test_our_load_client_writes_its_keys(
    mini_application: ServedApplication, tmp_path: Path
) -> None:
    theirs = load(mini_application, tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": ["Write a list of colours."]}) + "\n")
    command = [str(Path(sys.executable).with_name("hdserve")), "bench", "serve"]
    command += ["--base-url", mini_application.base_url, "--model", MODEL]
    command += ["--prompts", str(prompts), "--num-prompts", "4"]
    command += ["--concurrency", "2", "--max-tokens", "16"]
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=120, check=True
    )
    (ours,) = json.loads(done.stdout)["results"]
    assert theirs.keys() - ITS_OWN <= ours.keys()

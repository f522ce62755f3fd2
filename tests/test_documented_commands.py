"""Every ``hdserve`` command of README, docs and Kubernetes jobs runs, with small stand-ins for its
files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hdserve.cli.commands import app
from tests.documents import shell_commands
from tests.k8s.manifests import K8S

MODEL = "hdserve-mini"
DATABASE = "/var/lib/hdserve/model-database"
RUN_ELSEWHERE = ("serve", "bench serve")
"""In ``test_serve_cluster`` and ``deployments/test_bench_serve``: they need a server."""

STAND_INS = {
    "MODEL": MODEL,
    "hdserve-tiny": MODEL,
    "Qwen/Qwen2.5-0.5B-Instruct": MODEL,
    "Qwen/Qwen2.5-7B-Instruct": MODEL,
    "qwen2.5-7b": MODEL,
    "llama-2-7b": "qwen2.5-0.5b",  # of which a test machine can hold the weights
    "phrase": "hierarchy",
    "autoregressive,phrase": "autoregressive,hierarchy",
    "specbench-vicuna-7b.eval.jsonl.gz": "recorded.eval.jsonl.gz",
    "specbench-vicuna-7b.fill.jsonl.gz": "recorded.fill.jsonl.gz",
    "alpaca-siblings.fill.jsonl.gz": "recorded.fill.jsonl.gz",
    "DATA/tokenizers/llama2": MODEL,
    "corpus.jsonl.gz": "texts.jsonl.gz",
    "bfloat16": "float32",  # some CPUs have to emulate it
    "DTYPE": "float32",
    "1,2,4,8,16,32": "1,2",
    "1,8,32": "1,2",
    DATABASE: "database",
    "/tmp/qwen.hdb": "qwen.hdb",
    "/var/lib/hdserve/corpora": "texts.jsonl.gz",
    "/var/lib/hdserve/prompts.jsonl": "prompts.jsonl",
    "/var/lib/hdserve/statistics/qwen2.5": "statistics/job",
    "/dev/stdin": "config.yaml",
}
SMALLER = {"--max-tokens": "4", "--rounds": "1", "--max-mib": "64"}
MORE = {
    ("bench", "engine"): ["--no-compile", "--limit", "1"],
    ("generate", "I want"): ["--model", MODEL, "--max-tokens", "4"],
    ("generate", "--prompts"): ["--model", MODEL, "--max-tokens", "4"],
    ("database", "build"): ["--max-tokens", "4"],
    ("check-lossless", "--model"): ["--max-tokens", "48"],  # without an accepted draft it fails
}


def in_pages() -> Iterator[list[str]]:
    """The commands of README and docs, also those that are run in a pod."""
    for words in shell_commands():
        is_in_a_pod = words[0] == "kubectl" and "--" in words
        yield words[words.index("--") + 1 :] if is_in_a_pod else words


def in_jobs() -> Iterator[list[str]]:
    """What the jobs of Kubernetes run; each option and its value are a word each."""
    for path in sorted(K8S.glob("*/job.yaml")):
        pod = yaml.safe_load(path.read_text())["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        words = [word.split("=", 1) for word in container["command"] + container["args"]]
        yield [part for word in words for part in word]


SHOWN = sorted(
    {
        tuple(words[1:])
        for words in (*in_pages(), *in_jobs())
        if words[0] == "hdserve" and not " ".join(words[1:]).startswith(RUN_ELSEWHERE)
    },
    key=lambda words: (words[:2] not in (("database", "build"), ("statistics", "build")), words),
)
"""What makes a database before what reads it."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files are that the commands name."""
    directory = tmp_path_factory.mktemp("documented")
    prompts = [{"prompt": "A table for two", "turns": ["A table for two"]}] * 2
    others = [{"prompt": "Another table", "turns": ["Another table"]}]
    for name, rows in (
        ("prompts.jsonl", prompts),
        ("prompts60.jsonl", prompts),
        ("prompts18.jsonl", prompts),
        ("prompts32.jsonl", prompts),
        ("others120.jsonl", others),
    ):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = json.dumps({"text": "A table for two in San Jose, please. " * 5}) + "\n"
    (directory / "texts.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    recorded = {"id": "r", "task": "t", "prompt": [1, 2, 3], "response": [4, 5, 6] * 5}
    (directory / "recorded.jsonl").write_text(json.dumps(recorded) + "\n")
    for part in ("eval", "fill"):
        path = directory / f"recorded.{part}.jsonl.gz"
        path.write_bytes(gzip.compress((json.dumps(recorded) + "\n").encode()))
    (directory / "config.yaml").write_text(
        f"models:\n  - name: a\n    model: {MODEL}\nmodel_database:\n  snapshot_dir: snapshots\n"
    )
    application = {"import_path": "deployments:app", "args": {"config": "config.yaml"}}
    text = yaml.safe_dump({"applications": [application]})
    rendered = [{"kind": "Service"}, {"kind": "RayService", "spec": {"serveConfigV2": text}}]
    (directory / "rendered.yaml").write_text(yaml.safe_dump_all(rendered))
    return directory


def stood_in(words: tuple[str, ...]) -> list[str]:
    """The command with stand-ins, and smaller."""
    found = [STAND_INS.get(word, word) for word in words]
    for index, word in enumerate(found[:-1]):
        if word in SMALLER:
            found[index + 1] = SMALLER[word]
    for (first, second), more in MORE.items():
        if words[0] == first and words[1].startswith(second):
            found += more
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_a_shown_command_runs(
    words: tuple[str, ...], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does what it is shown for; ``doctor`` may find that something is wrong here."""
    monkeypatch.chdir(directory)
    result = CliRunner().invoke(app, stood_in(words))
    assert result.exit_code in ({0, 1} if words[0] == "doctor" else {0}), result.output
    assert result.stdout

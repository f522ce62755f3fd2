"""`hdserve statistics` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from hdserve.cli.commands import app
from hdserve.databases.statistics import StatisticsDatabase


def test_build_takes_inputs_and_leaves_sources_out(tmp_path: Path) -> None:
    rows = [
        {"source": "Books", "licence": "MIT", "text": "It was the best of times."},
        {"source": "Answers", "licence": "MIT", "text": "It was the worst of times."},
    ]
    corpus = tmp_path / "rows.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "more.txt").write_text("It was the age of wisdom.\n")
    target = tmp_path / "statistics"
    command = ["statistics", "build", "--tokenizer", "hdserve-tiny", "--input", str(corpus)]
    command += ["--input", str(tmp_path / "*.txt"), "--exclude", "Answers", "--exclude", "Nothing"]
    result = CliRunner().invoke(app, [*command, "--output", str(target), "--max-mib", "4"])
    assert result.exit_code == 0, result.output
    assert "left out: 1 texts of Answers" in result.stdout
    assert "no row has a source that begins with 'Nothing'" in result.stdout
    found = {
        corpus.name: corpus.licences for corpus in StatisticsDatabase.open(target).info.corpora
    }
    assert found == {"Books": ("MIT",), "more.txt": ()}
    shown = CliRunner().invoke(app, ["statistics", "info", str(target)])
    assert "Books" in shown.stdout
    assert "MIT" in shown.stdout


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["statistics", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_json(tmp_path: Path) -> None:
    """Every command says the same of the same database; merged twice, counts add up."""
    corpus = tmp_path / "text.txt"
    corpus.write_text("It was the best of times, it was the worst of times.\n")
    first, both = tmp_path / "first", tmp_path / "both"
    options = ("--output", str(first), "--max-mib", "4")
    config = tmp_path / "config.yaml"  # the tokenizer may be that of a model of a server
    config.write_text("models: [{name: a, model: hdserve-tiny}, {name: m, model: hdserve-mini}]")
    named = ("--tokenizer", "m", "--config", str(config))
    built = run("build", *named, "--input", str(corpus), *options)
    assert built.pop("num_excluded") == {}
    assert built == run("info", str(first))
    assert built["num_tokens"] > 5
    assert built["corpora"][0]["name"] == "text.txt"
    merged = run("merge", str(first), str(first), "--output", str(both), "--max-mib", "4")
    assert merged["num_tokens"] == 2 * built["num_tokens"]
    assert merged["directory"] == str(both)

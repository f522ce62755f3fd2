"""``hdserve check-config``, and the configurations that ship as examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hdserve.cli import app
from hdserve.config import read_config
from hdserve.errors import ConfigError

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples" / "configs").glob("*.yaml"))


def check(path: Path) -> Result:
    return CliRunner().invoke(app, ["check-config", str(path)])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_right(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example is a configuration, down to the options and files it names."""
    monkeypatch.chdir(ROOT)
    result = check(path)
    assert result.exit_code == 0, result.exception
    assert result.stdout.endswith(": ok\n")
    for model in read_config(path).models:
        assert f"{model.name}: " in result.stdout


def test_there_is_an_example_of_each_kind() -> None:
    names = {path.stem for path in EXAMPLES}
    assert names == {"one_model", "several_models", "namespaces", "gpu"}


MODEL = "models: [{name: a, model: hdserve-tiny%s}]\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            MODEL % ", num_replica: 2",
            "models.0.num_replica: unknown key; did you mean 'num_replicas'",
        ),
        (MODEL % "" + "gatway: {}", "gatway: unknown key; did you mean 'gateway'"),
        (MODEL % ", drafting: {drafters: [{name: hierarchie}]}", "unknown drafter 'hierarchie'"),
        (
            MODEL % ", drafting: {drafters: [{name: hierarchy, options: {frob: 1}}]}",
            "models.0.drafting.drafters: drafter hierarchy: frob: unknown key",
        ),
        (MODEL % ", tool_parser: xml", "models.0.tool_parser: "),
        ("models: [{name: a, model: /no/such/place}]", "models.0.model: there is no directory"),
        (MODEL % "" + "access: {api_keys_file: /no/such/file}", "access: cannot read the API keys"),
        (MODEL % "" + "access: {admin_key: short}", "access: access.admin_key needs at least"),
        ("models: [", "cannot read the configuration"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, reason: str) -> None:
    """Where it is and what was meant; the file comes first."""
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    error: Any = check(path).exception
    assert isinstance(error, ConfigError)
    assert reason in error.message
    assert str(path) in error.message.splitlines()[0]

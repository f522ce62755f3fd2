"""``--json [PATH]`` means the same in every command."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from hdserve.cli.commands import app
from hdserve.cli.interruption import how_to_go_on
from hdserve.cli.json_option import JsonCommand, JsonOutput, with_path
from hdserve.cli.progress import progress
from hdserve.errors import ConfigError, InvalidRequest
from tests.bench.stand_in import StandIn
from tests.closed import closed

MODEL = "hdserve-mini"
SMALL = ("--model", MODEL, "--max-tokens", "8")
PROMPTS = ("--prompts", "prompts.jsonl", *SMALL)
RECORDED = {"id": "a", "prompt": [1, 2], "response": [3, 4, 5, 3, 4, 5]}

COMMANDS: dict[str, tuple[str, ...]] = {
    "config": (),
    "check-config": ("config.yaml",),
    "doctor": ("--config", "config.yaml"),
    "generate": ("A table for two.", *SMALL),
    "check-lossless": PROMPTS,
    "bench engine": (*PROMPTS, "--rounds", "1", "--no-compile"),
    "bench replay": ("--eval", "replay.jsonl"),
    "bench serve": ("--base-url", "SERVER", "--prompts", "prompts.jsonl", "--concurrency", "1"),
    "statistics build": ("--tokenizer", MODEL, "--input", "text.txt", "--output", "built"),
    "statistics info": ("statistics",),
    "statistics merge": ("statistics", "--output", "merged"),
    "database build": ("databases", *PROMPTS),
    "database info": ("databases",),
    "database export": ("databases", "NEW.hdb"),
    "database import": ("archive.hdb", "imported"),
}
"""What each command is called with, in a directory that has the files."""

SLOW = {"check-lossless", "bench engine", "bench serve", "doctor", "generate"}

ELSEWHERE = {"database stop"}
"""In ``actors/test_stop.py``: it needs a Ray cluster."""

WITHOUT = {"serve"}
"""It has no result."""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def in_app(group: typer.Typer, *above: str) -> Iterator[tuple[str, Any]]:
    """All commands by their words."""
    for command in group.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        yield " ".join([*above, name]), command
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from in_app(inner.typer_instance, *above, str(inner.name))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands are called with."""
    path = tmp_path_factory.mktemp("json")
    (path / "config.yaml").write_text(json.dumps({"models": [{"name": "m", "model": MODEL}]}))
    (path / "prompts.jsonl").write_text('{"turns": ["good morning"]}\n')
    (path / "replay.jsonl").write_text(json.dumps(RECORDED) + "\n")
    (path / "text.txt").write_text("It was the best of times.\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        built = ("statistics", "build", *COMMANDS["statistics build"], "--output", "statistics")
        for arguments in (
            built,
            ("database", "build", *COMMANDS["database build"]),
            ("database", "export", "databases", "archive.hdb"),
        ):
            assert run(*arguments).exit_code == 0
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with closing(StandIn()) as running:
        yield running


def test_every_command_has_it() -> None:
    found = dict(in_app(app))
    assert set(found) == set(COMMANDS) | ELSEWHERE | WITHOUT
    for name in {*COMMANDS, *ELSEWHERE}:
        assert found[name].cls is JsonCommand, name
        assert "--json" in run(*name.split(), "--help").stdout, name


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in COMMANDS],
)
def test_printed_or_written(
    name: str, directory: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, JSON is all there is on standard output; with a path, text is there and JSON in the
    file, with the same keys."""
    monkeypatch.chdir(directory)

    def call(*options: str) -> str:
        places = {"SERVER": server.base_url, "NEW.hdb": f"{len(options)}.hdb"}
        words = [places.get(word, word) for word in COMMANDS[name]]
        result = run(*name.split(), *words, *options)
        assert result.exit_code in {0, 1}, result.output
        return result.stdout

    text = call("--json", "found.json")
    with pytest.raises(ValueError, match=r"Expecting value|Extra data"):
        json.loads(text)
    written = json.loads(Path("found.json").read_text())
    assert written
    assert not Path("found.json.unfinished").exists()
    assert keys(json.loads(call("--json"))) == keys(written)


def keys(found: Any) -> Any:
    return sorted(found) if isinstance(found, dict) else [keys(item) for item in found]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--json"], ["--json=-"]),
        (["dir", "--json"], ["dir", "--json=-"]),
        (["--json", "--verify", "dir"], ["--json=-", "--verify", "dir"]),
        (["--json", "-m", "dir"], ["--json=-", "-m", "dir"]),
        (["--json", "--", "dir"], ["--json=-", "--", "dir"]),
        (["--", "--json"], ["--", "--json"]),
        (["--json", "-", "dir"], ["--json", "-", "dir"]),
        (["--json", "out", "dir"], ["--json", "out", "dir"]),
        (["--json=out", "dir"], ["--json=out", "dir"]),
        ([], []),
    ],
)
def test_what_is_its_path(arguments: list[str], expected: list[str]) -> None:
    assert with_path(arguments) == expected


def test_a_hyphen_is_standard_output(directory: Path) -> None:
    """In both places, and with an equals sign."""
    wanted = json.loads(run("statistics", "info", str(directory / "statistics"), "--json").stdout)
    for option in (("--json", "-"), ("--json=-",)):
        found = run("statistics", "info", *option, str(directory / "statistics")).stdout
        assert json.loads(found) == wanted


@pytest.mark.parametrize("path", [".", "none/out.json"])
def test_a_path_that_cannot_be_written_is_refused(
    path: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is done."""
    monkeypatch.chdir(directory)
    for name in ("statistics info", "bench replay"):
        with pytest.raises(ConfigError, match="--json"):
            run(*name.split(), *COMMANDS[name], "--json", path)


def test_a_path_in_a_closed_directory_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    for path in (inside / "out.json", inside / "deeper" / "out.json"):
        with closed(inside), pytest.raises(ConfigError) as caught:
            JsonOutput(path)
        assert caught.value.message == f"--json {path}: cannot be written: Permission denied"


def test_beside_a_pipe_nothing_is_kept(tmp_path: Path) -> None:
    """Nor beside a device: what was written there cannot go on."""
    for name in ("new", "there"):
        assert JsonOutput(tmp_path / name).lasting_file == tmp_path / name
        (tmp_path / "there").touch()
    os.mkfifo(tmp_path / "pipe")
    output = JsonOutput(tmp_path / "pipe")
    assert (output.file, output.lasting_file) == (tmp_path / "pipe", None)


@pytest.mark.parametrize(
    "given", [("--json", "/dev/null"), ("--json=/dev/null",), ("--json",), ("--json", "-")], ids=str
)
def test_the_advice_has_one_file(given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a job could be resumed from, instead of what its result was written to."""
    monkeypatch.setattr("sys.argv", ["hdserve", "bench", "replay", *given, "--eval", "a"])
    wanted = "hdserve bench replay --eval a --json FILE"
    assert how_to_go_on(None).partition(": ")[2] == wanted


def test_the_advice_can_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option that is for a terminal alone."""
    command = ["hdserve", "generate", "--show-drafts", "--prompts", "a"]
    monkeypatch.setattr("sys.argv", command)
    wanted = "hdserve generate --prompts a --json FILE"
    assert how_to_go_on(None).partition(": ")[2] == wanted


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompts"),
        ("bench", "engine", "--prompts"),
        ("bench", "serve", "--base-url", "http://127.0.0.1:9", "--prompts"),
        ("check-lossless", "--prompts"),
        ("check-config",),
        ("statistics", "build", "--tokenizer", "hdserve-tiny", "--output", "x", "--input"),
    ],
    ids=" ".join,
)
def test_a_file_that_is_read_is_not_written_over(command: tuple[str, ...], tmp_path: Path) -> None:
    """However it is spelt."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n')
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match=r"--json .*link: another argument names this file"):
        run(*command, str(path), "--json", str(tmp_path / "link"))
    assert path.read_text() == '{"prompt": "a"}\n'


def test_a_mistake_in_a_configuration_is_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("modles: []\n")
    command = ["check-config", str(tmp_path / "config.yaml"), "--json"]
    with pytest.raises(ConfigError, match="did you mean 'models'"):
        run(*command, str(tmp_path / "out.json"))
    written = json.loads((tmp_path / "out.json").read_text())
    printed = run(*command)
    assert printed.exit_code == 2
    assert json.loads(printed.stdout) == written
    assert not written["ok"]


def test_colours_are_text(tmp_path: Path) -> None:
    for path in ("-", str(tmp_path / "out")):
        with pytest.raises(InvalidRequest, match="--show-drafts"):
            run("generate", "a", "--show-drafts", "--json", path)


def test_bars_are_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that takes what is told has the lines of a job, and none of its bars, nor empty
    ones."""
    with progress("counting", 2) as bar:
        bar.advance()
        bar.print("resumed")
    assert capsys.readouterr().err == "resumed\n"

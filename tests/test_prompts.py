"""One format of files of prompts, for every command that takes one."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from hdserve.cli.commands import app
from hdserve.cli.options import PROMPTS_HELP
from hdserve.errors import ConfigError
from hdserve.prompts import PromptRow, read_prompts, rows_digest

QUESTION = "Is there a train to Cambridge?"
CHAT = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "On which day?"},
    {"role": "user", "content": "On Monday."},
]
ASKING = [{"prompt": QUESTION}, {"turns": [QUESTION, "And back?"]}, {"messages": CHAT}]
COMMANDS = {
    ("generate",),
    ("check-lossless",),
    ("bench", "engine"),
    ("bench", "serve"),
    ("database", "build"),
}


def write(path: Path, *rows: Any) -> Path:
    """A file of rows, with an empty line in it."""
    path.write_text("\n" + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def test_three_ways_to_ask(tmp_path: Path) -> None:
    """A text, the first of the turns of a conversation that is still to be, or one that was."""
    text, turns, chat = read_prompts(write(tmp_path / "prompts.jsonl", *ASKING))
    asked = [{"role": "user", "content": QUESTION}]
    assert (text.text, text.conversation, text.messages) == (QUESTION, (), asked)
    assert (turns.text, turns.conversation, turns.messages) == (QUESTION, (), asked)
    assert (chat.text, chat.conversation, chat.messages) == ("", CHAT, CHAT)
    assert [row.fields for row in (text, turns, chat)] == ASKING
    assert [row.name for row in (text, turns, chat)] == ["0", "1", "2"]


def test_the_digest_of_rows_follows_what_is_in_them(tmp_path: Path) -> None:
    """And nothing else of their file."""
    path, other = tmp_path / "prompts.jsonl", tmp_path / "other.jsonl"
    rows = read_prompts(write(path, *ASKING))
    other.write_text("".join(json.dumps(row) + "\n" for row in ASKING))
    assert rows_digest(rows) == rows_digest(read_prompts(other))
    for changed in (ASKING[:2], ASKING[::-1], [{**ASKING[0], "id": 1}, *ASKING[1:]]):
        assert rows_digest(read_prompts(write(path, *changed))) != rows_digest(rows)


def test_rows_are_in_memory_once(tmp_path: Path) -> None:
    """The text of their file is not, neither when it is read nor for its digest."""
    path = write(tmp_path / "prompts.jsonl", *({"prompt": f"{n}" * 5000} for n in range(400)))
    rows = read_prompts(path)
    assert len(rows) == 400
    for action in (lambda: read_prompts(path, 1), lambda: read_prompts(path), digest_of(rows)):
        tracemalloc.start()
        found = action()
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found
        assert peak - kept < path.stat().st_size / 10


def digest_of(rows: list[PromptRow]) -> Any:
    return lambda: rows_digest(rows)


def test_an_assistant_that_calls_needs_no_content(tmp_path: Path) -> None:
    """As the OpenAI API has it."""
    call = {"type": "function", "function": {"name": "find", "arguments": "{}"}}
    chat = [CHAT[0], {"role": "assistant", "tool_calls": [call]}]
    (row,) = read_prompts(write(tmp_path / "prompts.jsonl", {"messages": chat}))
    assert row.messages == chat


def test_a_request_of_the_batch_api_is_told_from_a_row(tmp_path: Path) -> None:
    """With what it takes to make one of it."""
    body = {"model": "hdserve-tiny", "messages": CHAT}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    path = write(tmp_path / "batch.jsonl", row)
    told = "line 2: a request of OpenAI's Batch API, whose `body` is not read: write `messages`"
    with pytest.raises(ConfigError, match=told):
        read_prompts(path)


def test_names_and_tasks(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "question_id": 81, "category": "writing"},
        {"prompt": "b", "task": "qa", "category": "writing"},
        {"prompt": "c"},
        {"prompt": "d", "task": None, "category": "qa", "question_id": None},
        {"prompt": "e", "category": None, "question_id": 0},
    ]
    found = read_prompts(write(tmp_path / "prompts.jsonl", *rows))
    assert [(row.name, row.task) for row in found] == [
        ("81", "writing"),
        ("1", "qa"),
        ("2", "all"),
        ("3", "qa"),
        ("0", "all"),
    ]
    assert read_prompts(tmp_path / "prompts.jsonl", 2) == found[:2]


def test_a_line_ends_with_a_line_feed_alone(tmp_path: Path) -> None:
    """Not with other characters that end a line of a text, and are in one."""
    text = "one\u2028two\x85three"
    assert read_prompts(write(tmp_path / "prompts.jsonl", {"prompt": text}))[0].text == text


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    """Editors of Windows begin a file with one."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\r\n{"prompt": "b"}\r\n', encoding="utf-8-sig")
    assert [row.text for row in read_prompts(path)] == ["a", "b"]


WRONG = ("an object with `prompt`, `messages` or `turns`", "`messages` are objects with")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", WRONG[0]),
        ("[]", WRONG[0]),
        ("{}", WRONG[0]),
        ('{"prompt": 3}', WRONG[0]),
        ('{"turns": []}', WRONG[0]),
        ('{"turns": [3]}', WRONG[0]),
        ('{"turns": "a"}', WRONG[0]),
        ('{"messages": []}', WRONG[0]),
        ("[" * 100_000, WRONG[0]),
        ('{"messages": ["hi"]}', WRONG[1]),
        ('{"messages": 5}', WRONG[1]),
        ('{"messages": [{"role": "user", "content": "hi"}, {"content": "hi"}]}', WRONG[1]),
        ('{"messages": [{"role": "user"}]}', WRONG[1]),
        (r'{"prompt": "a\ud83d"}', "half of a surrogate pair"),
        (r'{"prompt": "a", "note": "\ude00"}', "half of a surrogate pair"),
    ],
)
def test_wrong_rows(tmp_path: Path, line: str, reason: str) -> None:
    """A row that asks nothing is named by its line."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    assert caught.value.message.startswith(f"{path}, line 3: ")
    assert reason in caught.value.message


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (b"\xff", "not UTF-8 text"), (b"\n\n", "it contains no prompts")],
)
def test_wrong_files(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_prompts(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_lines_end_as_any_system_has_it(tmp_path: Path, name: str, end: str) -> None:
    path = tmp_path / name
    data = f'\ufeff{{"prompt": "a"}}{end}{{"prompt": "b"}}{end}'.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert [row.text for row in read_prompts(path)] == ["a", "b"]


def test_files_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.GZ"
    path.write_bytes(gzip.compress('{"prompt": "é"}\n'.encode()))
    assert [row.text for row in read_prompts(path)] == ["é"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"cannot read the prompts .*prompts.jsonl.GZ: \w"):
        read_prompts(path)
    path.write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match="Not a gzipped file"):
        read_prompts(path)


def test_every_command_means_the_same() -> None:
    """The option is called the same, and described the same, wherever it is."""
    found = set()
    for names, command in commands(typer.main.get_command(app)):
        for option in command.params:
            if "--prompts" in option.opts:
                found.add(names)
                assert PROMPTS_HELP in (getattr(option, "help", "") or "")
                assert option.metavar == "FILE"
    assert found == COMMANDS


def commands(command: Any, names: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        return [(names, command)]
    inner = command.commands.items()
    return [each for name, one in inner for each in commands(one, (*names, name))]


@pytest.mark.slow
def test_commands_take_every_way(tmp_path: Path) -> None:
    """One file for all of those that need no server."""
    prompts = write(tmp_path / "prompts.jsonl", *ASKING)
    model = ["--prompts", str(prompts), "--model", "hdserve-mini", "--max-tokens", "8"]
    engine = ["--no-compile", "--rounds", "1", "--compare", "hierarchy"]
    for arguments in (
        ["generate", *model, "--temperature", "0", "--json"],
        ["bench", "engine", *model, *engine],
        ["database", "build", str(tmp_path / "database"), *model],
    ):
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    answers = CliRunner().invoke(app, ["generate", *model, "--temperature", "0", "--json"]).stdout
    text, turns, chat = map(json.loads, answers.splitlines())
    assert text["text"] == turns["text"]
    assert [text["messages"], chat["messages"]] == [[CHAT[0]], CHAT]


def test_a_text_is_no_conversation() -> None:
    assert PromptRow("a", "all", "hi").messages == [{"role": "user", "content": "hi"}]

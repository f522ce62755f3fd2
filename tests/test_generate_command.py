"""``hdserve generate`` on the terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hdserve import LLM, Completion
from hdserve.cli import EXIT_INTERRUPTED
from hdserve.cli.answers import TextPrinter, with_answer
from hdserve.cli.commands import app
from hdserve.cli.generate import GenerateOptions, _rows, _settings
from hdserve.completion import CompletionBuilder
from hdserve.config import ModelConfig, checked
from hdserve.core import FinishReason, Source, StepOutput
from hdserve.engine.tokenization.tokenizer import load_tokenizer
from hdserve.errors import ConfigError, HdserveError, InvalidRequest, PromptTooLong
from hdserve.models import resolve_model
from tests.engines import make_sequence
from tests.interruption import interrupt_after, units
from tests.trials import shared_trials

OPTIONS = ["--model", "hdserve-mini", "--temperature", "0", "--max-tokens", "24"]
QUESTION = "I want to book a table for two."


@pytest.fixture(scope="module", autouse=True)
def trials() -> Iterator[None]:
    """Each command makes an engine; what it tries out is tested elsewhere."""
    with shared_trials():
        yield


def generate(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["generate", *arguments, *OPTIONS], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_rows_of_a_file(tmp_path: Path) -> None:
    """Each row becomes an object; what is asked again is answered equally, drafted or not."""
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": QUESTION}]
    rows = [{"id": 1, "prompt": QUESTION}, {"id": 2, "messages": chat}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    first, second = map(json.loads, generate("--prompts", str(path), "--json").splitlines())
    assert (first["id"], second["id"]) == (1, 2)
    assert first["text"] == second["text"] != ""
    for answer in (first, second):
        num_accepted = sum(answer["accepted_by_source"].values())
        assert answer["num_steps"] <= answer["num_tokens"] <= 24
        assert answer["num_tokens"] <= answer["num_steps"] + num_accepted + 1
    plain = json.loads(generate(QUESTION, "--json", "--no-drafts"))
    assert plain["text"] == first["text"]
    assert plain["num_drafts"] == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [([], "give a prompt, or a file"), ([QUESTION, "--prompts", "rows.jsonl"], "not both")],
)
def test_one_source_of_prompts_is_wanted(arguments: list[str], reason: str) -> None:
    found = CliRunner().invoke(app, ["generate", *arguments]).exception
    assert isinstance(found, InvalidRequest)
    assert reason in found.message


@pytest.mark.parametrize("is_printed", [True, False])
@pytest.mark.parametrize(("arguments", "num_slots"), [(["--batch-size", "2"], 2), ([], 3)])
def test_rows_are_answered_together(
    is_printed: bool,
    arguments: list[str],
    num_slots: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many as are asked for, else as the configuration says, each with its own fields and in the
    order of the file, whichever ends first."""
    path, out, config = (tmp_path / name for name in ("rows.jsonl", "answers.jsonl", "c.yaml"))
    rows = _write_questions(path, 5)
    model = {"name": "hdserve-mini", "model": "hdserve-mini", "engine": {"max_num_sequences": 3}}
    config.write_text(json.dumps({"models": [model]}))
    slots: list[int] = []
    as_completed = LLM.as_completed

    def noted(llm: LLM, *arguments: Any) -> Any:
        slots.append(llm._host.config.engine.max_num_sequences)
        found = sorted(as_completed(llm, *arguments), key=itemgetter(0))
        return reversed(found)

    monkeypatch.setattr(LLM, "as_completed", noted)
    output = ["--json"] if is_printed else ["--json", str(out)]
    printed = generate("--prompts", str(path), "--config", str(config), *arguments, *output)
    answers = [*map(json.loads, (printed if is_printed else out.read_text()).splitlines())]
    assert slots == [num_slots]
    assert [(answer["id"], answer["prompt"]) for answer in answers] == rows
    assert all(answer["text"] and answer["num_tokens"] <= 24 for answer in answers)


def test_a_job_goes_on_whichever_rows_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the last two, with another number of rows at a time: as if it had run out of memory."""
    path, out, whole = (tmp_path / name for name in ("rows.jsonl", "answers.jsonl", "whole.jsonl"))
    _write_questions(path, 5)
    command = ["--prompts", str(path), "--json"]
    as_completed = LLM.as_completed

    def interrupted(llm: LLM, *arguments: Any) -> Iterator[tuple[int, Completion]]:
        yield from sorted(as_completed(llm, *arguments), key=itemgetter(0))[:2:-1]
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "as_completed", interrupted)
    result = CliRunner().invoke(app, ["generate", *command, str(out), *OPTIONS])
    assert result.exit_code == EXIT_INTERRUPTED
    monkeypatch.undo()
    kept = units(tmp_path / "answers.jsonl.unfinished")
    assert [*kept] == ["row 4", "row 3"]
    assert "5 rows, 3 of them answered now" in generate(*command, str(out), "--batch-size", "2")
    answers = [*map(json.loads, out.read_text().splitlines())]
    assert answers[:2:-1] == [result["answer"] for result in kept.values()]
    generate(*command, str(whole))
    wanted = [*map(json.loads, whole.read_text().splitlines())]
    names = ("id", "prompt", "text", "finish_reason")
    assert [[answer[name] for name in names] for answer in answers] == [
        [answer[name] for name in names] for answer in wanted
    ]


def test_an_unfinished_job_goes_on_with_other_sizes() -> None:
    """Of its model, and of what is answered at a time; not with what may change an answer."""

    def settings(num_together: int | None = None, **model: Any) -> dict[str, Any]:
        config = checked(ModelConfig, {"name": "m", "model": "hdserve-mini", **model})
        options = GenerateOptions(prompt=QUESTION, batch_size=num_together)
        return _settings([{"prompt": QUESTION}], options, config)

    sizes: dict[str, Any] = {
        **{"max_num_sequences": 2, "max_num_queued": 2, "kv_cache_tokens": 64, "num_threads": 1},
        **{"prefill_chunk_tokens": 64, "prefill_slowdown": None},
    }
    places: dict[str, Any] = {"num_gpus": 1, "resources": {"a": 1}, "session_affinity": False}
    others: list[dict[str, Any]] = [{"dtype": "float32"}, {"max_model_len": 64}, {"exact": True}]
    assert settings() == settings(2, engine=sizes, num_cpus=2, num_replicas=2, **places)
    assert settings() == settings(autoscaling={"max_replicas": 2})
    for engine in others:
        assert settings(engine=engine | sizes) == settings(engine=engine) != settings()


def test_a_job_with_another_chat_template_is_another(tmp_path: Path) -> None:
    """Also where the file of the template is the same."""
    template = tmp_path / "chat.jinja"
    values = {"name": "m", "model": "hdserve-mini", "chat_template": str(template)}

    def settings(text: str) -> dict[str, Any]:
        template.write_text(text)
        options = GenerateOptions(prompt=QUESTION)
        return _settings([{"prompt": QUESTION}], options, checked(ModelConfig, values))

    first = settings("{{ messages[0].content }}")
    assert settings("{{ messages[0].content }}") == first
    assert settings("{{ messages[0].content }}!") != first


def test_a_model_is_that_of_a_server(tmp_path: Path) -> None:
    """By its name there, with its settings: here a template that shows nothing that was asked."""
    template, config = tmp_path / "chat.jinja", tmp_path / "config.yaml"
    template.write_text("A taxi to the")
    model = {"name": "m", "model": "hdserve-mini", "chat_template": str(template)}
    config.write_text(json.dumps({"models": [{"name": "n", "model": "hdserve-tiny"}, model]}))
    options = ["--config", str(config), "--model", "m", *OPTIONS[2:]]
    texts = [
        CliRunner().invoke(app, ["generate", *arguments], catch_exceptions=False).stdout
        for arguments in ((QUESTION, *options), ("How are you?", *options))
    ]
    assert texts[0] == texts[1] != ""
    assert texts[0] == generate("A taxi to the", "--complete")


def test_the_defaults_are_those_of_a_server(tmp_path: Path) -> None:
    """Unless an option says otherwise; how long an answer is as well."""
    config = tmp_path / "config.yaml"
    template = tmp_path / "chat.jinja"
    template.write_text("{{ start }}")
    variables = {"chat_template_kwargs": {"start": "A taxi to the"}}
    defaults = {"temperature": 0, "max_tokens": 5, **variables}
    model = {"name": "m", "model": "hdserve-mini", "chat_template": str(template)}
    config.write_text(json.dumps({"models": [{**model, "defaults": defaults}]}))

    def answer(*options: str) -> dict[str, Any]:
        arguments = ["generate", QUESTION, "--json", "--config", str(config), *options]
        stdout = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
        found: dict[str, Any] = json.loads(stdout)
        return found

    short, long = answer(), answer("--max-tokens", "24")
    assert short["num_tokens"] == 5 < long["num_tokens"]
    assert long["text"].startswith(short["text"])
    assert long["text"] == json.loads(generate("A taxi to the", "--complete", "--json"))["text"]


def test_a_row_ends_where_its_line_does(tmp_path: Path) -> None:
    """Its texts may hold what else Unicode breaks lines at, as JSON and this command write it."""
    path = tmp_path / "prompts.jsonl"
    row = {"prompt": f"One\u2028two\x85{QUESTION}"}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    answer = json.loads(generate("--prompts", str(path), "--json"))
    assert answer["prompt"] == row["prompt"]


def test_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is the same in colours, between a legend and the figures; without colours there is
    no legend."""
    text = generate(QUESTION).strip()
    assert text
    *lines, figures = generate(QUESTION, "--show-drafts").splitlines()
    assert "\n".join(lines).strip() == text
    assert "tokens in" in figures
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = generate(QUESTION, "--show-drafts")
    assert "\x1b[30;4" in coloured
    legend, *lines = re.sub(r"\x1b\[[\d;]*m", "", coloured).strip().splitlines()
    assert legend.split() == ["plain", "context", "model", "statistics", "recycled"]
    assert "\n".join(lines[:-1]) == text
    assert "tokens in" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "^give a prompt, or a file of them with --prompts$"),
        (["a", "--prompts", "prompts.txt"], "^give a prompt or --prompts, not both$"),
        (["--prompts", "none.txt"], r"^cannot read the prompts none\.txt: No such file"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt or a file, one of them, and a file that is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("b\n")
    with pytest.raises((InvalidRequest, ConfigError), match=reason):
        CliRunner().invoke(app, ["generate", *arguments], catch_exceptions=False)


def test_an_answer_that_failed_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """What there is of it is shown; it is not taken for an answer that is empty."""
    seq = make_sequence("a", [5])
    seq.finish_reason = FinishReason.ERROR
    error = HdserveError("the model has no numbers")
    outputs = [StepOutput(seq, texts=("so far",), sources=(Source.PLAIN,))]
    outputs.append(StepOutput(seq, finish_reason=seq.finish_reason, error=error))
    TextPrinter(shows_drafts=False).print(outputs)
    assert capsys.readouterr() == ("so far\n", "hdserve: the model has no numbers\n")
    answer = CompletionBuilder(seq)
    answer.add(outputs[0])
    assert "error" not in with_answer({}, answer.completion())
    answer.add(outputs[1])
    found = with_answer({}, answer.completion())
    assert (found["error"], found["text"]) == ("the model has no numbers", "so far")


def test_an_answer_that_is_interrupted_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What is told of it comes below."""

    def outputs() -> Iterator[StepOutput]:
        yield StepOutput(make_sequence("a", [5]), texts=("so far",), sources=(Source.PLAIN,))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TextPrinter(shows_drafts=False).print(outputs())
    assert capsys.readouterr().out == "so far\n"


@pytest.mark.parametrize("is_printed", [True, False])
def test_a_job_in_which_an_answer_failed_fails(is_printed: bool, tmp_path: Path) -> None:
    """Here for weights that are no numbers; the other rows are answered all the same."""
    output = tmp_path / "answers.jsonl"
    arguments = [*_poisoned(tmp_path), "--json"] + [str(output)] * (not is_printed)
    result = CliRunner().invoke(app, ["generate", *arguments])
    answers = result.stdout if is_printed else output.read_text()
    failed, answered = map(json.loads, answers.splitlines())
    assert failed["finish_reason"] == "error"
    assert failed["error"]
    assert answered["error"] is None
    assert answered["finish_reason"] in ("stop", "length")
    assert result.exit_code == 1


def test_the_same_command_answers_again_what_failed(tmp_path: Path) -> None:
    """And nothing else, until nothing fails."""
    output, journal = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.unfinished"
    command = ["generate", *_poisoned(tmp_path), "--json", str(output)]
    for num_now in (1, 0):
        result = CliRunner().invoke(app, command)
        assert f"2 rows, {num_now} of them answered now" in result.stdout
        assert "1 answers failed: this request could not be decoded" in result.stderr
        assert "; the same command tries them again\n" in result.stderr
        assert result.exit_code == 1
        assert [*units(journal)] == ["row 1"]
    answered = output.read_text().splitlines()[1]
    weights = Path(resolve_model("hdserve-mini")) / "model.safetensors"
    shutil.copyfile(weights, tmp_path / "model" / "model.safetensors")
    result = CliRunner().invoke(app, command)
    assert "2 rows, 1 of them answered now" in result.stdout
    assert (result.exit_code, journal.exists()) == (0, False)
    healed, *others = output.read_text().splitlines()
    assert json.loads(healed)["error"] is None
    assert others == [answered]


def test_a_file_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    """It has the answers, and its name is shown as well as it can be."""
    rows, out = tmp_path / "rows.jsonl", tmp_path / os.fsdecode(b"out\xff.jsonl")
    _write_questions(rows, 1)
    told = generate("--prompts", str(rows), "--json", str(out))
    assert "out\ufffd.jsonl: 1 rows, 1 of them answered now" in told
    assert len(out.read_text().splitlines()) == 1


def test_what_failed_in_a_pipe_is_not_tried_again(tmp_path: Path) -> None:
    """Nothing was kept there."""
    command = ["generate", *_poisoned(tmp_path), "--json", os.devnull]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "1 answers failed" in result.stderr
    assert "again" not in result.stderr


def _write_questions(path: Path, num_rows: int) -> list[tuple[int, str]]:
    """Write rows with an ``id`` and a ``prompt``, and return these."""
    rows = [(number, f"A table for {number}, please.") for number in range(num_rows)]
    lines = [json.dumps({"id": number, "prompt": prompt}) for number, prompt in rows]
    path.write_text("\n".join(lines))
    return rows


def _poisoned(directory: Path) -> list[str]:
    """Arguments for two rows and a model with which the first one fails."""
    model, rows = directory / "model", directory / "rows.jsonl"
    shutil.copytree(resolve_model("hdserve-mini"), model)
    weights = load_file(model / "model.safetensors")
    (poison,) = load_tokenizer("hdserve-mini").encode(" river", adds_special_tokens=False)
    weights["model.embed_tokens.weight"][poison] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    texts = ("A river", QUESTION)
    rows.write_text("".join(f'{{"prompt": "{text}", "error": null}}\n' for text in texts))
    return ["--prompts", str(rows), "--complete", *OPTIONS[2:], "--model", str(model)]


def test_a_row_may_have_a_field_of_this_name(tmp_path: Path) -> None:
    """It says nothing of the answer."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": QUESTION, "error": "what came before"}))
    (answer,) = map(json.loads, generate("--prompts", str(path), "--json").splitlines())
    assert answer["finish_reason"] in ("stop", "length")


def test_a_value_out_of_range_is_refused_before_a_model_is_loaded() -> None:
    """Here there is none of that name, of which nothing is said."""
    for option, value in (("--temperature", "200"), ("--seed", str(2**65))):
        arguments = ["generate", QUESTION, "--model", "hdserve-none", option, value]
        with pytest.raises(InvalidRequest, match=option[2:]):
            CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize("option", ["--complete", "--json"])
def test_an_empty_text_is_not_answered(option: str, tmp_path: Path) -> None:
    """As an argument, on standard input, or in a row of a file, which is named."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    for arguments, reason in (
        ([""], "the prompt is empty"),
        (["-"], "the prompt is empty"),
        (["--prompts", str(prompts)], "line 2: the prompt is empty"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            CliRunner().invoke(app, ["generate", *arguments, option], catch_exceptions=False)


def test_standard_input_that_is_no_text_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["generate", "-"], input=b"a\xff")
    assert isinstance(result.exception, InvalidRequest)
    assert result.exception.message == "standard input is not UTF-8 text"
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InvalidRequest, match="standard input is closed"):
        list(_rows(GenerateOptions(prompt="-")))


def test_how_standard_input_is_written_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a byte order mark nor the ends of lines."""
    given = BytesIO("\ufeffWhy?\r\nSo.".encode())
    monkeypatch.setattr("sys.stdin", TextIOWrapper(given))
    assert list(_rows(GenerateOptions(prompt="-", completes=True))) == [{"prompt": "Why?\nSo."}]


def test_a_prompt_that_is_too_long_is_named_before_any_is_answered(tmp_path: Path) -> None:
    """On the terminal and into a file; what the argument asks is no row."""
    prompts, long = tmp_path / "prompts.jsonl", "long " * 3000
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", long)))
    for output in ([], ["--json", str(tmp_path / "answers.jsonl")]):
        result = CliRunner().invoke(app, ["generate", "--prompts", str(prompts), *OPTIONS, *output])
        assert isinstance(result.exception, PromptTooLong)
        assert result.exception.message.startswith("row 2: this model's maximum context length")
        assert result.stdout == ""
    with pytest.raises(PromptTooLong, match=r"^this model's maximum context length"):
        generate(long)


@pytest.mark.slow
def test_an_interrupted_job_goes_on(tmp_path: Path) -> None:
    """After a real Ctrl-C: rows that were answered are kept, the text is that of a whole job."""
    rows = [{"id": number, "prompt": f"A table for {number}, please."} for number in range(40)]
    asked, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    journal = tmp_path / "answers.jsonl.unfinished"
    command = ["--prompts", str(asked), "--json"]
    told = interrupt_after(3, journal, "generate", *command, str(out), *OPTIONS)
    assert "interrupted; the same command keeps what was finished" in told
    assert not out.exists()
    with journal.open("a") as file:
        file.write('{"unit": "row 39", "res')
    before = units(journal)
    assert 3 <= len(before) < len(rows)

    told = generate(*command, str(out))
    assert f"40 rows, {len(rows) - len(before)} of them answered now" in told
    assert not journal.exists()
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    for unit, result in before.items():
        assert answers[int(unit.removeprefix("row "))] == result["answer"]

    whole = tmp_path / "whole.jsonl"
    assert "40 of them answered now" in generate(*command, str(whole))
    for one, line in zip(answers, whole.read_text().splitlines(), strict=True):
        other = json.loads(line)
        names = ("id", "prompt", "messages", "text", "finish_reason", "num_tokens")
        assert [one[name] for name in names] == [other[name] for name in names]


def test_answers_of_a_prompt_are_written(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert "1 rows, 1 of them answered now" in generate(QUESTION, "--json", str(out))
    assert json.loads(out.read_text())["text"]

"""``hdserve bench engine``: an interrupted job goes on with the rounds it has not ended."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

from benchmarks import engine_results
from hdserve.bench.contenders import (
    EngineContender,
    GenerateContender,
    Measurement,
    Run,
    State,
)
from hdserve.bench.engine import Result, Runs, filling, run_rounds, summarise
from hdserve.bench.engine_setup import (
    encoded_prompts,
    make_contenders,
    prompt_tasks,
    replay_tasks,
    use_statistics,
)
from hdserve.bench.prompts import EncodedPrompt
from hdserve.bench.task import Decoding, Task
from hdserve.cli.bench_engine import CONTENDERS, EngineOptions, print_results
from hdserve.cli.bench_engine_job import EngineJob, _model
from hdserve.cli.commands import app
from hdserve.config import ModelConfig
from hdserve.core import Source
from hdserve.engine.attention.packed import ATTENTION_NAME
from hdserve.engine.engine import Engine
from hdserve.engine.host import ModelHost
from hdserve.engine.loading import cache_size
from hdserve.engine.loading.loader import prepare_model
from hdserve.errors import ConfigError, HdserveError, InvalidRequest
from hdserve.journal import Journal
from hdserve.prompts import PromptRow, read_prompts
from tests.interruption import interrupt_after, units
from tests.models import make_model
from tests.trials import shared_trials

TEXTS = ("I want to book a table for two.", "A taxi to the station, please.")


@pytest.fixture(scope="module", autouse=True)
def trials() -> Iterator[None]:
    """Many tests make an engine; what it tries out is tested elsewhere."""
    with shared_trials():
        yield


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"turns": [text], "task": text.split()[0]} for text in TEXTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_host() -> ModelHost:
    """A model whose drafts do not follow the time a forward takes, which is not measured."""
    config = {
        "name": "m",
        "model": "hdserve-mini",
        "engine": {"compile": False, "kv_cache_tokens": 4096},
        "drafting": {"adapts_budget": False},
    }
    return ModelHost(ModelConfig.model_validate(config))


@pytest.fixture(scope="module")
def host() -> ModelHost:
    """For tests that change nothing of it."""
    return make_host()


class SharesHost:
    """Notes what share of the free memory each engine may take, and makes none."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def make_engine(self, *, is_drafting: bool, memory_share: float) -> Engine:
        assert is_drafting == bool(self.shares)
        self.shares.append(memory_share)
        return cast("Engine", None)


def test_engines_leave_one_another_memory() -> None:
    """On a GPU, where the first would take nearly all that is free."""
    host, names = SharesHost(), ["autoregressive", "hierarchy", "prompt-lookup"]
    made = make_contenders(names, cast("ModelHost", host), "cold")
    assert [one.name for one in made] == names
    assert host.shares == [1 / 3, 1 / 2, 1]


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("bench", "engine", "--batch-sizes", "1,a"), "--batch-sizes is a list of numbers"),
        (("bench", "engine", "--batch-sizes", "0"), "--batch-sizes is a list of numbers"),
        (("bench", "engine", "--dtype", "int3"), "engine.dtype"),
        (("bench", "engine", "--max-draft-tokens", "-1"), "drafting.max_draft_tokens"),
        (("bench", "engine", "--state", "hot"), "--state is one of cold, online, warm"),
        (("bench", "engine", "--state", "warm"), "--state warm and --fill belong together"),
        (("bench", "engine", "--fill", "x"), "--state warm and --fill belong together"),
        (("bench", "engine", "--compare", "hierarchy,x"), "unknown contender 'x'"),
        (
            ("bench", "engine", "--compare", "hierarchy,prompt-lookup"),
            "would share what was generated",
        ),
        (
            ("bench", "engine", "--compare", "transformers", "--batch-sizes", "1,4"),
            "--batch-sizes 1,4: transformers decodes one sequence at a time",
        ),
        (("bench", "engine", "--replay", "x"), "exactly one of --prompts and --replay"),
        (("check-lossless", "--dtype", "int3"), "engine.dtype"),
    ],
)
def test_wrong_options_are_named(options: tuple[str, ...], reason: str, prompts: Path) -> None:
    """Before a model is loaded, and not by a traceback."""
    with pytest.raises(ConfigError, match=reason):
        bench(*options, "--prompts", str(prompts))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--prompts", "{prompts}", "--temperature", "100.5"), "temperature must be at least 0"),
        (("--prompts", "{prompts}", "--max-tokens", f"{1 << 63}"), "max_tokens must be at least 1"),
        (("--prompts", "{wrong}"), "wrong.jsonl, line 1: not valid JSON"),
        (("--prompts", "{prompts}", "--statistics", "none"), "cannot read none"),
        (
            ("--prompts", "{prompts}", "--state", "warm", "--fill", "none"),
            "cannot read the prompts none",
        ),
        (("--replay", "none"), "cannot read none"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(
    options: tuple[str, ...], reason: str, prompts: Path
) -> None:
    """Of a model that there is not, nothing is said."""
    wrong = prompts.with_name("wrong.jsonl")
    wrong.write_text("no JSON\n")
    given = [option.format(prompts=prompts, wrong=wrong) for option in options]
    with pytest.raises(HdserveError, match=reason):
        bench("bench", "engine", "--model", "/no/model", *given)


def test_by_default_all_that_can_be_is_measured() -> None:
    """With recorded choices, too."""
    assert EngineOptions(prompts=Path("x")).contenders == list(CONTENDERS)
    assert EngineOptions(replay=Path("x")).contenders == list(CONTENDERS[:-1])


@pytest.mark.parametrize(("exact", "wanted"), [(None, "auto"), (True, True), (False, False)])
def test_exact_is_what_a_configuration_calls_so(exact: bool | None, wanted: object) -> None:
    """Which is "auto" only if nothing is said."""
    options = EngineOptions(prompts=Path("x"), exact=exact)
    assert _model(options).engine.exact == wanted


def test_the_model_is_that_of_a_server(tmp_path: Path) -> None:
    """With its settings, except for those that are given, and those that would disturb."""
    config = tmp_path / "config.yaml"
    lookup = {"name": "prompt-lookup", "options": {"max_draft_tokens": 5}}
    drafters = [lookup, {"name": "hierarchy"}]
    model = {
        "name": "m",
        "model": "hdserve-mini",
        "engine": {"compile": False, "exact": True, "dtype": "float32", "max_num_sequences": 9},
        "drafting": {"drafters": drafters, "max_draft_tokens": 3},
    }
    config.write_text(json.dumps({"models": [model]}))
    options = EngineOptions(
        prompts=Path("x"), config=config, batch_sizes="1,4", compare="autoregressive,prompt-lookup"
    )
    found = _model(options)
    assert (found.name, found.engine.compile, found.engine.exact) == ("m", False, True)
    assert (found.engine.dtype, found.engine.max_num_sequences) == ("float32", 4)
    assert not found.engine.prefix_caching
    assert found.engine.prefill_slowdown is None
    assert [dict(each) for each in found.drafting.drafters] == [lookup]
    other = dataclasses.replace(options, compile_=True, dtype="bfloat16", max_draft_tokens=7)
    changed = _model(other)
    assert (changed.engine.compile, changed.engine.dtype) == (True, "bfloat16")
    assert changed.drafting.max_draft_tokens == 7


def test_what_is_named_twice_is_measured_once() -> None:
    """A size's second rounds would be its first ones, and the second of two contenders of a name
    would not have its turns."""
    options = EngineOptions(prompts=Path("x"), batch_sizes="4,1,4", compare="hierarchy,hierarchy")
    assert options.sizes == [4, 1]
    assert options.contenders == ["hierarchy"]


def test_an_answer_that_leaves_no_prompt_is_named(prompts: Path, host: ModelHost) -> None:
    with pytest.raises(ConfigError, match="--max-tokens 1048576 leaves nothing"):
        list(encoded_prompts(read_prompts(prompts), host, 1 << 20))


def test_a_replay_is_not_looked_up_in(tmp_path: Path) -> None:
    """What transformers generates cannot be held to a record."""
    compare = ("--compare", "transformers-prompt-lookup")
    with pytest.raises(ConfigError, match="cannot follow recorded choices"):
        bench("bench", "engine", "--replay", str(tmp_path / "x"), *compare)


def test_recorded_requests_that_are_empty_are_left_out(tmp_path: Path, host: ModelHost) -> None:
    rows = [
        {"id": name, "task": "qa", "prompt": prompt, "response": response}
        for name, prompt, response in (("a", [5, 6], []), ("b", [], [7]), ("c", [5], [6, 7]))
    ]
    path = tmp_path / "replay.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (task,), num_left_out = replay_tasks(path, None, host, 8)
    assert num_left_out == 2
    assert [tuple(prompt.token_ids) for prompt in task.prompts] == [(5,)]
    assert task.recorded == [(6, 7)]


def test_a_small_cache_leaves_less_room(tmp_path: Path) -> None:
    """Where a prompt fits the model, but not its engines: it is cut, or left out, before one is
    decoded."""
    options: dict[str, Any] = {"engine": {"compile": False, "kv_cache_tokens": 128}}
    host = ModelHost(ModelConfig(name="m", model="hdserve-mini", **options))
    contender, _ = make_contenders(["hierarchy", "autoregressive"], host, "cold")
    assert isinstance(contender, EngineContender)
    (prompt,) = encoded_prompts([PromptRow("a", "all", TEXTS[0] * 50)], host, 8)
    path = tmp_path / "replay.jsonl"
    rows = [{"prompt": [5] * length, "response": [6]} for length in (20, 200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert replay_tasks(path, None, host, 8)[1] == 1
    assert prompt.is_cut
    assert len(prompt.token_ids) + 8 <= host.max_total_tokens < host.model.max_model_len
    assert len(contender.answers([prompt], 8)[0]) == 8


def test_a_cache_that_memory_makes_small_leaves_less_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is known when there is an engine, so prompts are cut, or left out, then."""
    bytes_per_token = 6 * 2 * 2 * 64 * 4  # layers, keys and values, heads, numbers in float32
    monkeypatch.setattr(cache_size, "free_bytes", lambda _: 120 * bytes_per_token)
    monkeypatch.setattr(cache_size, "_CPU_MEMORY_SHARE", 1.0)
    prompts, replay = tmp_path / "prompts.jsonl", tmp_path / "replay.jsonl"
    prompts.write_text(json.dumps({"prompt": TEXTS[0] * 50}))
    rows = [{"prompt": [5] * length, "response": [6] * 8} for length in (20, 200)]
    replay.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: dict[str, Any] = {"model": "hdserve-mini", "max_tokens": 8, "rounds": 1}
    asked |= {"compile_": False, "dtype": "float32", "compare": "hierarchy,autoregressive"}
    for file, counted in (({"prompts": prompts}, "cut"), ({"replay": replay}, "left_out")):
        job = EngineJob(EngineOptions(**asked, **file), None)
        assert job.setting[counted] == 1
        assert {result.num_rounds for result in job.run()} == {1}


@pytest.mark.parametrize("kind", ["--replay", "--prompts"])
def test_what_fills_nothing_is_refused(tmp_path: Path, kind: str) -> None:
    """The start would not be warm; it is told before a model is loaded."""
    asked, empty = tmp_path / "asked.jsonl", tmp_path / "empty.jsonl"
    asked.write_text('{"prompt": %s}\n' % ('[3], "response": [5]' if kind == "--replay" else '"a"'))
    empty.touch()
    options = (kind, str(asked), "--state", "warm", "--fill", str(empty), "--model", "/no")
    with pytest.raises(
        ConfigError, match=r"empty\.jsonl: (it contains no prompts|there is no rec)"
    ):
        bench("bench", "engine", *options, "--compare", "hierarchy")


def test_rows_without_a_task_are_one_beside_others(prompts: Path, host: ModelHost) -> None:
    """All together is another group, whose figures would take the place of theirs."""
    with prompts.open("a") as file:
        file.write('{"prompt": "Which?"}\n')

    def names() -> list[str]:
        return [task.name for task in prompt_tasks(read_prompts(prompts), host, 8)]

    assert names() == ["I", "A", "no task"]
    prompts.write_text('{"prompt": "Which?"}\n')
    assert names() == ["all"]


def test_recorded_requests_of_which_none_fits_are_refused(tmp_path: Path, host: ModelHost) -> None:
    path = tmp_path / "replay.jsonl"
    path.write_text('{"prompt": [5], "response": [6]}\n')
    with pytest.raises(ConfigError, match="none of its 1 requests can be decoded"):
        replay_tasks(path, None, host, 1 << 20)


@pytest.mark.parametrize("name", ["prompt", "response"])
def test_recorded_requests_of_another_tokenizer_are_refused(
    tmp_path: Path, host: ModelHost, name: str
) -> None:
    """Before one of them is decoded, which one is told."""
    path, row = tmp_path / "replay.jsonl", {"prompt": [5], "response": [6]}
    foreign = {**row, name: [7, host.model.vocab_size]}
    path.write_text(f"{json.dumps(row)}\n{json.dumps(foreign)}\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=f"request 2: {name}: the token id"):
        replay_tasks(path, None, host, 8)


def test_results_say_what_they_are_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files, limits, what was left out and how far the rounds were apart; where weights are noise,
    every line says so."""
    rows = [{"prompt": [5, 6], "response": [7, 8, 9]}, {"prompt": [5], "response": []}]
    path, out = tmp_path / "replay.jsonl", tmp_path / "out.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--replay", str(path), "--model", "hdserve-mini", "--no-compile", "--rounds", "1"]
    options += ["--compare", "autoregressive,hierarchy", "--batch-sizes", "1,2"]
    options += ["--state", "warm", "--fill", str(path), "--max-tokens", "3", "--limit", "2"]
    outcome = bench("bench", "engine", *options, "--json", str(out))
    assert "range" in outcome.stdout
    assert "95 %" not in outcome.stdout
    results = json.loads(out.read_text())["results"]
    for row in results:
        named = {"prompts": path.name, "fill": path.name, "limit": 2, "left_out": 1, "cut": 0}
        named |= {"in_fill": 1, "max_tokens": 3, "max_draft_tokens": 16, "weights": "real"}
        assert named.items() <= row.items()
    noise = [{**row, "weights": "random", "num_rounds": 6} for row in results]
    engine_results.print_setting(noise[0])
    engine_results.print_table(noise)
    setting, _, head, _, *lines = capsys.readouterr().out.strip().splitlines()
    assert f"prompts {path.name}, limit 2, left_out 1, cut 0, max_tokens 3" in setting
    assert "to autoregressive (95 %)" in head
    assert [line.count("random weights") for line in lines] == [1] * 4
    fields = {field.name for field in dataclasses.fields(Result)}
    made = [Result(**{name: row[name] for name in fields}) for row in noise]
    print_results(made, noise[0])
    lines = capsys.readouterr().out.splitlines()
    assert sum("random weights" in line for line in lines if "│" in line) == 4
    assert any("95 %" in line for line in lines)


def test_prompts_that_are_cut_are_counted(prompts: Path, tmp_path: Path) -> None:
    """The figures are of less than the file has, which is told only where it is so."""
    config, out = tmp_path / "config.yaml", tmp_path / "out.json"
    engine = {"compile": False, "kv_cache_tokens": 128}
    model = {"name": "m", "model": "hdserve-mini", "engine": engine}
    config.write_text(json.dumps({"models": [model]}))
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": TEXTS[0] * 50}) + "\n")
    options = ["--prompts", str(prompts), "--config", str(config), "--compare", "autoregressive"]
    options += ["--max-tokens", "2", "--rounds", "1", "--json", str(out)]
    for limit, num_cut in ((2, 0), (3, 1)):
        outcome = bench("bench", "engine", *options, "--limit", str(limit))
        assert {row["cut"] for row in json.loads(out.read_text())["results"]} == {num_cut}
        assert re.findall(r"cut:\s+(\d+)", outcome.stdout) == ["1"] * num_cut


def test_the_tables_of_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """Over all tasks in full, by task what each contender gains; nothing by task where there is but
    one, or no plain decoding."""
    runs: Runs = {
        (name, task): [Measurement(seconds, num_tokens=12) for seconds in times]
        for name, task, times in (
            ("autoregressive", "qa", (2.0, 2.0, 3.0)),
            ("autoregressive", "rag", (4.0, 4.0, 4.0)),
            ("hierarchy", "qa", (1.0, 2.0, 1.0)),
            ("hierarchy", "rag", (4.0, 5.0, 2.0)),
        )
    }
    together: Runs = {(name, "all"): runs[name, task] for name, task in runs if task == "qa"}
    drafted: Runs = {key: runs[key] for key in runs if key[0] == "hierarchy"}

    def printed(*made: tuple[int, Runs]) -> list[str]:
        results = [row for size, part in made for row in summarise(part, Decoding(size, 12))]
        rows = [{**dataclasses.asdict(row), "weights": "real"} for row in results]
        engine_results.print_table(rows)
        engine_results.print_tasks(rows)
        return capsys.readouterr().out.strip().splitlines()

    head, _, *lines = printed((1, runs), (2, together))
    assert "| to autoregressive (range) |" in head
    assert [line.rsplit(" | ", 3)[0] for line in lines[:4]] == [
        "| 1 | all | autoregressive | 4 | 1.00 (1.00..1.00) | 72.00",
        "| 1 | all | hierarchy | 5 | 1.20 (0.86..2.33) | 72.00",
        "| 2 | all | autoregressive | 6 | 1.00 (1.00..1.00) | 36.00",
        "| 2 | all | hierarchy | 12 | 2.00 (1.00..3.00) | 36.00",
    ]
    assert lines[4:] == [
        "",
        "By task group, to autoregressive (range):",
        "",
        "| batch | contender | qa | rag |",
        "|--:|---|---|---|",
        "| 1 | hierarchy | 2.00 (1.00..3.00) | 1.00 (0.80..2.00) |",
    ]
    assert len(printed((2, together))) == 4
    assert len(printed((1, drafted))) == 3
    first = {key: rounds[:1] for key, rounds in runs.items()}
    assert printed((1, first))[-4:] == [
        "",
        "| batch | contender | qa | rag |",
        "|--:|---|---|---|",
        "| 1 | hierarchy | 2.00 | 1.00 |",
    ]


def test_any_drafter_is_a_contender(tmp_path: Path) -> None:
    """It drafts alone, beside those that do not draft."""
    path, out = tmp_path / "replay.jsonl", tmp_path / "out.json"
    path.write_text(json.dumps({"prompt": [5, 6, 7] * 3, "response": [5, 6, 7] * 9}) + "\n")
    options = ["--replay", str(path), "--model", "hdserve-mini", "--no-compile", "--rounds", "1"]
    options += ["--compare", "autoregressive,prompt-lookup", "--json", str(out)]
    bench("bench", "engine", *options)
    plain, drafted = json.loads(out.read_text())["results"]
    assert (plain["contender"], plain["accepted_by_source"]) == ("autoregressive", {})
    assert drafted["contender"] == "prompt-lookup"
    assert set(drafted["accepted_by_source"]) == {"context"}


def test_what_transformers_drafts_is_counted(tmp_path: Path) -> None:
    """By the rows of its forwards, without those of the prompts."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    rows = [{"prompt": f"Repeat after me: {text} {text}"} for text in TEXTS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--prompts", str(prompts), "--model", "hdserve-mini", "--no-compile"]
    options += ["--rounds", "1", "--max-tokens", "24", "--json", str(out)]
    bench("bench", "engine", *options, "--compare", "transformers,transformers-prompt-lookup")
    plain, drafted = json.loads(out.read_text())["results"]
    assert (plain["mean_draft_tokens"], plain["mean_acceptance_length"]) == (0, 1)
    assert 0 < drafted["mean_acceptance_length"] - 1 <= drafted["mean_draft_tokens"] <= 10


def test_a_job_does_not_go_on_with_forwards_of_the_other_kind(
    tmp_path: Path, prompts: Path
) -> None:
    """Which are exact may be left to what is measured at its start."""
    out, journal = tmp_path / "out.json", tmp_path / "out.json.unfinished"
    options = EngineOptions(
        prompts=prompts, model="hdserve-mini", compare="autoregressive", compile_=False
    )
    is_exact = EngineJob(options, out).setting["exact"]
    (begun,) = map(json.loads, journal.read_text().splitlines())
    begun["settings"]["is_exact"] = not is_exact
    journal.write_text(f"{json.dumps(begun)}\n" + '{"unit": "a", "result": []}\n')
    with pytest.raises(ConfigError, match="is_exact was"):
        EngineJob(options, out)


@pytest.mark.parametrize("asked", ["the same", "something else"])
def test_measured_prompts_that_are_answered_before_are_counted(
    tmp_path: Path, prompts: Path, asked: str
) -> None:
    fill, row = tmp_path / "fill.jsonl", {"prompt": read_prompts(prompts, 1)[0].text}
    if asked == "something else":
        row["prompt"] += " Please."
    fill.write_text(json.dumps(row))
    options = EngineOptions(
        prompts=prompts, model="hdserve-mini", state="warm", fill=fill, compile_=False
    )
    assert EngineJob(options, None).setting["in_fill"] == (asked == "the same")


def test_statistics_are_those_that_are_named(tmp_path: Path) -> None:
    """A copy of no request and of nothing generated before is accepted from them alone."""
    answer = [50 + (7 * index) % 97 for index in range(60)]
    row = {"id": "a", "task": "qa", "prompt": [5, 6], "response": answer}
    path = tmp_path / "replay.jsonl"
    path.write_text(3 * (json.dumps(row) + "\n"), encoding="utf-8")
    host = make_host()
    use_statistics(host, [path], is_replay=True)
    hierarchy = EngineContender("hierarchy", host, is_drafting=True, state="cold")
    (task,), _ = replay_tasks(path, 1, host, len(answer))
    measured = to_the_end(hierarchy.run(task, Decoding(1, len(answer))))
    assert measured.drafts.accepted_by_source[Source.STATISTICS] > len(answer) // 2


def test_statistics_of_another_tokenizer_are_refused(tmp_path: Path, host: ModelHost) -> None:
    path = tmp_path / "replay.jsonl"
    path.write_text('{"id": "a", "prompt": [5, 6], "response": [7]}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="another tokenizer"):
        use_statistics(host, [path], is_replay=False)


def test_rounds_that_ended_are_kept(tmp_path: Path) -> None:
    """Interrupted in the middle of a round, that round is decoded anew, and no other."""
    host = make_host()
    contenders = [
        EngineContender(name, host, is_drafting=name == "hierarchy", state="cold")
        for name in ("autoregressive", "hierarchy")
    ]
    encoded = [
        EncodedPrompt(PromptRow(text, "all", text), tuple(host.tokenizer.encode(text)), False)
        for text in TEXTS
    ]
    tasks = [Task(str(index), [prompt]) for index, prompt in enumerate(encoded)]

    def decode(num_before_interruption: int | None) -> tuple[Runs, list[int]]:
        runs: list[int] = []

        def note() -> None:
            runs.append(1)
            if len(runs) == num_before_interruption:
                raise KeyboardInterrupt

        found = run_rounds(
            contenders,
            tasks,
            Decoding(1, 8),
            num_rounds=3,
            journal=Journal(tmp_path / "out", {}),
            progress=note,
        )
        return found, runs

    journal = tmp_path / "out.unfinished"
    with pytest.raises(KeyboardInterrupt):
        decode(6)
    assert list(units(journal)) == ["batch 1, round 0"]
    kept = journal.read_bytes()
    found, runs = decode(None)
    assert len(runs) == 3 * 2 * 2
    assert journal.read_bytes().startswith(kept)
    assert set(found) == {(c.name, task.name) for c in contenders for task in tasks}
    again, _ = decode(None)
    assert again == found
    for measured in found.values():
        assert [one.num_tokens for one in measured] == [8, 8, 8]
        assert all(one.num_steps == one.drafts.num_steps > 0 for one in measured)


@pytest.mark.parametrize(("state", "batch_size"), [("cold", 1), ("online", 3)])
def test_a_round_knows_nothing_of_the_round_before(state: State, batch_size: int) -> None:
    """All draft the same, with the calibration that ships, also for prompts that come again."""
    host = make_host()
    prompts = [
        EncodedPrompt(PromptRow(text, "all", text), tuple(host.tokenizer.encode(text)), False)
        for text in TEXTS
    ]
    runs = run_rounds(
        [EngineContender("hierarchy", host, is_drafting=True, state=state)],
        [Task("all", prompts)],
        Decoding(batch_size, 60),
        num_rounds=3,
    )
    first, *others = runs["hierarchy", "all"]
    assert first.drafts.num_draft_tokens > 0
    assert all(other.drafts == first.drafts for other in others)


def test_prompts_that_come_again_are_warm() -> None:
    """They draft from what fills the database, and from nothing else at first."""
    host = make_host()
    prompt = EncodedPrompt(
        PromptRow("a", "all", TEXTS[0]), tuple(host.tokenizer.encode(TEXTS[0])), False
    )
    contender = EngineContender("hierarchy", host, is_drafting=True, state="warm")
    (answer,) = contender.answers([prompt], 60)
    contender.fill_with([answer])
    contender.begin_round()
    found = to_the_end(contender.run(Task("all", [prompt]), Decoding(4, 60)))
    assert found.num_steps < 0.5 * found.num_tokens
    for namespace in ("default", "again 1", "again 2", "again 3"):
        partition = host.own_database.partition(namespace)
        assert partition is not None
        assert partition.num_tokens >= len(answer)


def test_transformers_decode_as_hdserve_does() -> None:
    """Whatever the model's own generation config asks for."""
    host = make_host()
    module: Any = host.model.module
    own = GenerationConfig.from_dict({"repetition_penalty": 1000.0, "no_repeat_ngram_size": 1})
    module.generation_config = own
    prompt = EncodedPrompt(
        PromptRow("a", "all", TEXTS[0]), tuple(host.tokenizer.encode(TEXTS[0])), False
    )
    wanted = EngineContender("plain", host, is_drafting=False, state="cold")
    (answer,) = wanted.answers([prompt], 60)
    assert len(set(answer)) < 60
    seen: list[int] = []
    contender = GenerateContender("transformers", host, looks_up=False)
    to_the_end(contender.run(Task("all", [prompt]), Decoding(1, 1)))  # begins with one untimed
    embeddings = module.get_input_embeddings()
    handle = embeddings.register_forward_pre_hook(lambda _, ids: seen.extend(ids[0][0].tolist()))
    to_the_end(contender.run(Task("all", [prompt]), Decoding(1, 60)))
    handle.remove()
    assert seen == [*prompt.token_ids, *answer[:-1]]
    assert module.generation_config is own


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_transformers_choose_their_own_attention(architecture: str) -> None:
    """The sinks of one of them are nothing that PyTorch's own attention knows."""
    config = ModelConfig.model_validate({"name": "m", "model": "hdserve-mini", "statistics": None})
    module = make_model(architecture, torch.float32)
    host = ModelHost(config, model=prepare_model(module, config.engine))
    contender = GenerateContender("transformers", host, looks_up=False)
    prompt = EncodedPrompt(PromptRow("a", "all", ""), (3, 4, 5), is_cut=False)
    found = to_the_end(contender.run(Task("all", [prompt]), Decoding(1, 4)))
    assert (found.num_tokens, found.num_steps) == (4, 4)
    assert cast("Any", module.config)._attn_implementation == ATTENTION_NAME


def test_an_answer_that_fails_fills_nothing() -> None:
    """What there is of it is no answer."""
    host = make_host()
    ids = tuple(host.tokenizer.encode(TEXTS[0]))
    cast("Any", host.model.module).get_input_embeddings().weight.data[ids[-1]] = float("nan")
    contender = EngineContender("c", host, is_drafting=True, state="warm")
    with pytest.raises(HdserveError):
        contender.answers([EncodedPrompt(PromptRow("a", "all", ""), ids, is_cut=False)], 4)


def test_slots_are_full_to_the_end() -> None:
    """As sequences end others begin, until as many tokens came as the answers have."""
    host = make_host()
    prompts = [
        EncodedPrompt(PromptRow(text, "all", text), tuple(host.tokenizer.encode(text)), False)
        for text in (*TEXTS, *TEXTS, TEXTS[0])
    ]
    for is_drafting in (False, True):
        contender = EngineContender("c", host, is_drafting=is_drafting, state="warm")
        found = to_the_end(contender.run(Task("all", prompts), Decoding(3, 20)))
        assert 100 <= found.num_tokens < 100 + 3 * 17
        assert found.num_steps > 2.5 * found.num_engine_steps
        stats = contender._engine.stats
        assert stats.num_running == stats.num_waiting == stats.num_drafter_sequences == 0


def to_the_end(run: Run) -> Measurement:
    while True:
        try:
            next(run)
        except StopIteration as ended:
            return cast("Measurement", ended.value)


def test_contenders_take_turns() -> None:
    """Whoever has the least share of its tokens goes on; each is measured for itself."""
    host = make_host()
    turns: list[tuple[str, float]] = []

    class Watched(EngineContender):
        def run(self, *arguments: Any) -> Run:
            run = super().run(*arguments)
            while True:
                try:
                    share = next(run)
                except StopIteration as ended:
                    return cast("Measurement", ended.value)
                turns.append((self.name, share))
                yield share

    prompts = [
        EncodedPrompt(PromptRow(text, "all", text), tuple(host.tokenizer.encode(text)), False)
        for text in TEXTS
    ]
    made = [
        Watched("autoregressive", host, is_drafting=False, state="cold", slice_s=0.0),
        Watched("hierarchy", host, is_drafting=True, state="cold", slice_s=0.0),
        GenerateContender("transformers", host, looks_up=False),
    ]
    found = run_rounds(
        made,
        [Task("all", prompts)],
        Decoding(1, 40),
        num_rounds=1,
    )
    latest = {"autoregressive": 0.0, "hierarchy": 0.0}
    for name, share in turns:
        assert latest[name] == min(latest.values())
        latest[name] = share
    assert latest == {"autoregressive": 1.0, "hierarchy": pytest.approx(1.0, abs=0.25)}
    for (name, _), (measured,) in found.items():
        assert measured.num_tokens == pytest.approx(80, abs=17)
        times = measured.times
        timed_s = times.draft_s + times.forward_s + times.verify_s
        assert timed_s <= measured.seconds
        assert (timed_s == 0.0) == (name == "transformers")


def test_a_run_that_is_closed_leaves_nothing() -> None:
    host = make_host()
    prompts = [
        EncodedPrompt(PromptRow(text, "all", text), tuple(host.tokenizer.encode(text)), False)
        for text in TEXTS
    ]
    contender = EngineContender("c", host, is_drafting=True, state="cold", slice_s=0.0)
    run = contender.run(Task("all", prompts), Decoding(2, 400))
    assert 0 < next(run) < 1
    assert contender._engine.stats.num_running == 2
    run.close()
    stats = contender._engine.stats
    assert stats.num_running == stats.num_waiting == stats.num_drafter_sequences == 0


def make_task(name: str, size: int, *, is_recorded: bool = False) -> Task:
    prompts = [
        EncodedPrompt(PromptRow(f"{name}{index}", name, ""), (index,), False)
        for index in range(size)
    ]
    return Task(name, prompts, [[index] for index in range(size)] if is_recorded else None)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_batches_are_full(is_recorded: bool) -> None:
    """Where a task has fewer prompts than the batch has sequences, the tasks take turns."""
    tasks = [make_task(name, size, is_recorded=is_recorded) for name, size in (("a", 3), ("b", 5))]
    for size in (1, 3):
        assert filling(tasks, size) == tasks
    (task,) = filling(tasks, 4)
    assert task.name == "all"
    names = [prompt.row.name for prompt in task.prompts]
    assert names == ["a0", "b0", "a1", "b1", "a2", "b2", "b3", "b4"]
    wanted = [[int(name[1])] for name in names]
    assert task.recorded == (wanted if is_recorded else None)
    assert filling(tasks[:1], 4) == tasks[:1]


@pytest.mark.slow
def test_the_command_goes_on(tmp_path: Path, prompts: Path) -> None:
    """After each real Ctrl-C: the figures are those of all rounds, each measured once."""
    out, journal = tmp_path / "out.json", tmp_path / "out.json.unfinished"
    options = ["bench", "engine", "--prompts", str(prompts), "--json", str(out)]
    options += ["--model", "hdserve-mini", "--no-compile"]
    options += ["--compare", "autoregressive,hierarchy"]
    options += ["--state", "warm", "--fill", str(prompts), "--max-tokens"]
    endless = [*options, "8", "--rounds", "1000000"]
    told = interrupt_after(3, journal, *endless)
    assert "interrupted; the same command keeps what was finished" in told
    before = units(journal)
    assert next(iter(before)) == "hierarchy, fill"
    interrupt_after(len(before) + 2, journal, *endless)
    after = units(journal)
    assert list(after.items())[: len(before)] == list(before.items())
    assert not out.exists()

    with pytest.raises(ConfigError, match="max_tokens was 8, is 9"):
        bench(*options, "9")

    num_rounds = len(after) - 1  # one unit is what fills the database
    assert bench(*options, "8", "--rounds", str(num_rounds)).exit_code == 0
    assert not journal.exists()
    results = json.loads(out.read_text())["results"]
    assert {row["task"] for row in results} == {"I", "A", "all"}
    assert {(row["num_rounds"], row["interruptions"]) for row in results} == {(num_rounds, 2)}
    for row in results:
        if row["task"] != "all":
            speeds = [
                run["num_tokens"] / run["seconds"]
                for name, unit in after.items()
                for contender, task, run in (unit if "round" in name else ())
                if (contender, task) == (row["contender"], row["task"])
            ]
            assert row["tokens_per_s"] == pytest.approx(statistics.median(speeds))

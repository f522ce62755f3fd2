"""Replay: the count of steps is that of a model which says the recording."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hdserve.bench.replay import Replay, ReplayMode, verify_recorded
from hdserve.bench.replay_files import ReplayRow, read_replay
from hdserve.bench.replay_result import ReplayResult
from hdserve.bench.replay_setup import load_drafting, open_statistics
from hdserve.cli.commands import app
from hdserve.core import Sequence, Source
from hdserve.databases.model import ModelDatabase
from hdserve.drafting.base import Drafter, DraftResources, Forward
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.drafting.hierarchy_paper import HierarchyPaper
from hdserve.drafting.prompt_lookup import PromptLookup
from hdserve.errors import ConfigError, DatabaseError, HdserveError
from hdserve.journal import Journal
from hdserve.tree import Acceptance, DraftTree
from tests.drafters import JunkDrafter, OracleDrafter
from tests.interruption import interrupt_after, units

ANSWER = (5, 6, 7, 8, 9, 5, 6, 7, 8, 2)


def _rows(*answers: tuple[int, ...]) -> list[ReplayRow]:
    return [ReplayRow(f"r{n}", f"t{n % 2}", (1, 3, 4), a) for n, a in enumerate(answers)]


def _replay(drafter: object, rows: list[ReplayRow], mode: ReplayMode = ReplayMode.COLD) -> Replay:
    replay = Replay([drafter], ModelDatabase(1 << 20), mode, 8, 24)  # type: ignore[list-item]
    replay.run(rows)
    return replay


def test_oracle_takes_one_step_for_five_tokens() -> None:
    """9 tokens follow the first: a step of 5 drafted and a bonus, then one of the last 3."""
    futures = {"r0#0": [1, 3, 4, *ANSWER]}
    result = _replay(OracleDrafter(futures), _rows(ANSWER)).result
    assert (result.num_tokens, result.num_steps) == (9, 2)
    assert result.mean_acceptance_length == 4.5
    assert result.accepted_by_source == {Source.OTHER: 8}


@pytest.mark.parametrize("is_oracle_first", [True, False])
def test_an_oracle_beside_another_drafter_counts(is_oracle_first: bool) -> None:
    """Behind one that fills the tree, too."""
    drafters = [OracleDrafter({"r0#0": [1, 3, 4, *ANSWER]}), JunkDrafter(100)]
    if not is_oracle_first:
        drafters.reverse()
    replay = Replay(drafters, ModelDatabase(1 << 20), ReplayMode.COLD, 8, 24)
    replay.run(_rows(ANSWER))
    assert replay.result.num_steps == 2


@pytest.mark.parametrize("call", ["start", "propose", "observe", "finish"])
@pytest.mark.parametrize("has_others", [False, True])
def test_a_drafter_that_fails_is_named(call: str, has_others: bool) -> None:
    """And the request, the call and the line; it is not left out, as a server would."""

    class Failing(JunkDrafter):
        def __getattribute__(self, name: str) -> Any:
            return _fail if name == call else super().__getattribute__(name)

    drafters = [Failing(100), *([JunkDrafter(100)] if has_others else [])]
    replay = Replay(drafters, ModelDatabase(1 << 20), ReplayMode.COLD, 8, 24)
    reason = rf"^drafter junk failed in {call} of request r0#0: KeyError: 7 \(test_replay.py:\d+\)$"
    with pytest.raises(HdserveError, match=reason):
        replay.run(_rows(ANSWER))


@pytest.mark.parametrize("name", ["", "r"])
def test_requests_of_one_name_that_run_together_are_told_apart(name: str) -> None:
    """As drafters may keep what they know of a request by its id."""
    running: set[str] = set()

    class Keeping(JunkDrafter):
        def start(self, seq: Sequence) -> None:
            assert seq.request_id not in running
            running.add(seq.request_id)

        def finish(self, seq: Sequence) -> None:
            running.remove(seq.request_id)

    rows = [ReplayRow(name, "t", (1, 3, 4), ANSWER[:length]) for length in (9, 5, 2, 7, 9)]
    replay = Replay([Keeping(100)], ModelDatabase(1 << 20), ReplayMode.ONLINE, 8, 24, 3)
    replay.run(rows)
    assert not running
    assert replay.result.num_requests == len(rows)


def _fail(*_: Any) -> None:
    raise KeyError(7)


def test_without_a_right_guess_each_token_is_a_step() -> None:
    result = _replay(PromptLookup(DraftResources(100)), _rows((5, 6, 7, 8))).result
    assert (result.num_tokens, result.num_steps) == (3, 3)
    assert result.mean_acceptance_length == 1.0


@pytest.mark.parametrize("concurrency", [2, 3, 16])
def test_requests_at_a_time_count_the_same(concurrency: int) -> None:
    """Requests in turn are the same requests, whether some have no answer or end earlier."""
    rows = _rows(ANSWER, (), (5,), (5, 6, 7, 8), ANSWER)

    def result(concurrency: int) -> dict[str, object]:
        drafter = PromptLookup(DraftResources(100))
        database = ModelDatabase(1 << 20)
        replay = Replay([drafter], database, ReplayMode.ONLINE, 8, 24, concurrency)
        done: list[None] = []
        replay.run(rows, lambda: done.append(None))
        assert len(done) == len(rows)
        figures = replay.result.as_json()
        return {key: value for key, value in figures.items() if "latency" not in key}

    assert result(concurrency) == result(1)


def test_requests_at_a_time_draft_from_one_another() -> None:
    """Of two equal answers at once, each is drafted from what the other has said."""
    answer = tuple(range(10, 60))

    def num_steps(drafts_from: ModelDatabase | None) -> int:
        database = drafts_from or ModelDatabase(1 << 20)
        drafter = Hierarchy(DraftResources(100, drafts_from))
        replay = Replay([drafter], database, ReplayMode.ONLINE, 8, 24, concurrency=2)
        replay.run(_rows(answer, answer))
        return replay.result.num_steps

    assert num_steps(None) > 90
    assert num_steps(ModelDatabase(1 << 20)) < 75


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.data())
def test_acceptance_is_the_longest_path(remaining: list[int], data: st.DataObject) -> None:
    tree = DraftTree(0, 12)
    for _ in range(12):
        parent = data.draw(st.integers(0, len(tree) - 1))
        tree.add_node(parent, data.draw(st.integers(0, 2)), Source.OTHER)
    acceptance = verify_recorded(tree, remaining)
    drafted = [tree.token_ids[node] for node in acceptance.path[1:]]
    assert drafted == remaining[: len(drafted)]
    assert list(acceptance.token_ids) == remaining[: len(drafted) + 1]
    if len(drafted) < len(remaining):
        assert tree.child(acceptance.path[-1], remaining[len(drafted)]) is None


def test_modes_keep_what_they_say() -> None:
    """The same answer twice: cold learns nothing from the first, online copies it."""

    def steps(mode: ReplayMode, fill: bool = False) -> int:
        database = ModelDatabase(1 << 20)
        replay = Replay([Hierarchy(DraftResources(100, database))], database, mode, 8, 24)
        if fill:
            replay.fill(_rows(long))
        replay.run(_rows(long, long))
        return replay.result.num_steps

    long = tuple(range(10, 60))
    cold, online, warm = (
        steps(ReplayMode.COLD),
        steps(ReplayMode.ONLINE),
        steps(ReplayMode.WARM, fill=True),
    )
    assert cold > online > warm


def test_files_are_read_with_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for number in range(5):
            file.write(json.dumps({"id": number, "prompt": [1], "response": [2, 3]}) + "\n\n")
    rows = list(read_replay(path, 3))
    assert [row.name for row in rows] == ["0", "1", "2"]
    assert rows[0].task == "all"


def test_a_mark_of_the_byte_order_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": "a", "prompt": [1], "response": [2]}\n', encoding="utf-8-sig")
    assert [row.name for row in read_replay(path)] == ["a"]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prompt": [1]}', '{"prompt": [1], "response": [-2]}']
)
def test_wrong_rows_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DatabaseError, match="line 1"):
        list(read_replay(path))


def test_ids_of_no_vocabulary_are_named(tmp_path: Path) -> None:
    """What is kept by id would need all memory there is."""
    path = tmp_path / "r.jsonl"
    path.write_text(
        '{"prompt": [1048575], "response": [2]}\n{"prompt": [1048576], "response": [2]}'
    )
    with pytest.raises(DatabaseError, match="line 2: a token id is not a number from 0 to 1048575"):
        list(read_replay(path))


def test_drafting_section_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("drafting:\n  drafters:\n  - name: prompt-lookup\n")
    assert load_drafting(path).drafters[0].name == "prompt-lookup"
    path.write_text("drafter: []\n")
    with pytest.raises(ConfigError, match="did you mean 'drafters'"):
        load_drafting(path)


def _write(path: Path, rows: list[ReplayRow]) -> Path:
    lines = [
        json.dumps({"id": r.name, "task": r.task, "prompt": r.prompt, "response": r.response})
        for r in rows
    ]
    path.write_text("\n".join(lines))
    return path


def test_statistics_of_files(tmp_path: Path) -> None:
    path = _write(tmp_path / "s.jsonl", _rows(ANSWER, ANSWER))
    database = open_statistics([path], 1 << 20)
    assert database is not None
    assert database.info.num_tokens == 26
    assert open_statistics([], 1 << 20) is None


def test_command_writes_its_figures(tmp_path: Path) -> None:
    evaluate = _write(tmp_path / "eval.jsonl", _rows(ANSWER, ANSWER, ANSWER))
    fill = _write(tmp_path / "fill.jsonl", _rows(ANSWER))
    out = tmp_path / "out.json"
    arguments = ["--eval", str(evaluate), "--fill", str(fill), "--statistics", str(fill)]
    arguments += ["--mode", "warm", "--budget", "8", "--floor", "0.01", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "replay", *arguments, "--limit", "2"])
    assert result.exit_code == 0, result.output
    assert "mean acceptance length" in result.output
    figures = json.loads(out.read_text())
    assert figures["requests"] == 2
    assert figures["tokens"] == 18
    assert figures["mean_acceptance_length"] == pytest.approx(18 / figures["steps"], abs=1e-4)
    assert set(figures["mean_acceptance_length_by_task"]) == {"t0", "t1"}
    assert figures["mean_draft_tokens"] <= 8
    assert sum(figures["accepted_by_source"].values()) <= 18
    assert figures["draft_latency_us"]["p50"] > 0
    assert figures["observe_latency_us"]["p99"] > 0
    assert figures["database_bytes"] > 0


def test_a_file_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    evaluate = _write(tmp_path / os.fsdecode(b"\xff.jsonl"), _rows(ANSWER))
    arguments = ["--eval", str(evaluate), "--json", str(tmp_path / "out.json")]
    assert CliRunner().invoke(app, ["bench", "replay", *arguments]).exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text())["eval"] == "\ufffd.jsonl"


def test_a_limit_of_scores_is_for_drafters_that_take_one(tmp_path: Path) -> None:
    """One of them must."""
    evaluate = _write(tmp_path / "eval.jsonl", _rows(ANSWER))
    path = tmp_path / "drafting.yaml"

    def replay(*names: str, **options: float) -> Result:
        drafters = [{"name": name, "options": options} for name in names]
        path.write_text(json.dumps({"drafters": drafters}))
        arguments = ["--eval", str(evaluate), "--config", str(path), "--floor", "0.01"]
        return CliRunner().invoke(app, ["bench", "replay", *arguments])

    assert replay("hierarchy", "prompt-lookup").exit_code == 0
    assert replay("hierarchy", min_score=0.01).exit_code == 0
    assert "takes a least score: prompt-lookup" in str(replay("prompt-lookup").exception)


def test_rows_without_a_task_are_one_beside_others(tmp_path: Path) -> None:
    """All together is another row, and the only one where no task is named."""
    evaluate, out = tmp_path / "eval.jsonl", tmp_path / "out.json"
    command = ["bench", "replay", "--eval", str(evaluate)]

    def names(*tasks: str) -> list[str]:
        _write(evaluate, [ReplayRow("r", task, (1, 3, 4), ANSWER) for task in tasks])
        shown = CliRunner().invoke(app, command, catch_exceptions=False).stdout
        assert CliRunner().invoke(app, [*command, "--json", str(out)]).exit_code == 0
        by_task = json.loads(out.read_text())["mean_acceptance_length_by_task"]
        cells = [line.split("│")[1].strip() for line in shown.splitlines() if "│" in line]
        assert [*dict.fromkeys([*by_task, "all"])] == cells
        return cells

    assert names("qa", "") == ["no task", "qa", "all"]
    assert names("qa", "qa") == ["qa", "all"]
    assert names("", "") == ["all"]


def test_a_configuration_says_how_much_is_drafted(tmp_path: Path) -> None:
    """And with what options, of one drafter, too; a budget of its own comes before."""
    evaluate = _write(tmp_path / "eval.jsonl", _rows(ANSWER))
    config, out = tmp_path / "c.yaml", tmp_path / "out.json"
    options = "{name: prompt-lookup, options: {max_draft_tokens: 2}}"
    config.write_text(
        f"drafting: {{max_draft_tokens: 3, drafters: [{options}, {{name: hierarchy}}]}}"
    )
    command = ["bench", "replay", "--eval", str(evaluate), "--json", str(out)]

    def figures(*options: str) -> dict[str, Any]:
        arguments = [*command, "--config", str(config), *options]
        outcome = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert outcome.exit_code == 0
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    assert figures()["budget"] == 3
    found = figures("--drafter", "prompt-lookup", "--budget", "8", "--limit", "1")
    assert (found["budget"], found["drafters"]) == (8, ["prompt-lookup"])
    assert found["mean_draft_tokens"] <= 2
    assert (found["config"], found["limit"], found["database_mib"]) == ("c.yaml", 1, 256)
    assert found["commit"]
    outcome = CliRunner().invoke(app, [*command, "--budget", "1000000"])
    assert (outcome.exit_code, "--budget" in outcome.output) == (2, True)


def test_what_fills_nothing_is_told(tmp_path: Path) -> None:
    """It is not named as what the result is of."""
    evaluate = _write(tmp_path / "eval.jsonl", _rows(ANSWER))
    out = tmp_path / "out.json"
    command = ["bench", "replay", "--eval", str(evaluate), "--fill", str(evaluate)]
    outcome = CliRunner().invoke(app, [*command, "--mode", "cold", "--json", str(out)])
    assert outcome.exit_code == 0
    assert "--fill is left out: in --mode cold nothing warms" in outcome.stderr
    assert json.loads(out.read_text())["fill"] == []


def test_warm_needs_a_fill_file(tmp_path: Path) -> None:
    evaluate = _write(tmp_path / "eval.jsonl", _rows(ANSWER))
    result = CliRunner().invoke(app, ["bench", "replay", "--eval", str(evaluate), "--mode", "warm"])
    assert isinstance(result.exception, ConfigError)


def test_cold_takes_one_request_at_a_time(tmp_path: Path) -> None:
    """Others that run would feed the database for it."""
    evaluate = _write(tmp_path / "eval.jsonl", _rows(ANSWER))
    command = ["bench", "replay", "--eval", str(evaluate), "--concurrency", "2"]
    result = CliRunner().invoke(app, [*command, "--mode", "cold"])
    assert isinstance(result.exception, ConfigError)
    assert "one request at a time" in str(result.exception)
    assert CliRunner().invoke(app, [*command, "--mode", "online"]).exit_code == 0


class _Stop(BaseException):
    """Ends a replay where a signal could."""


DRAFTERS: tuple[type[Drafter], ...] = (Hierarchy, HierarchyPaper, PromptLookup)


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.name)
@pytest.mark.parametrize("mode", list(ReplayMode))
@pytest.mark.parametrize("concurrency", [1, 3])
def test_interrupted_anywhere_it_counts_the_same(
    drafter: type[Drafter], mode: ReplayMode, concurrency: int, tmp_path: Path
) -> None:
    """Drafters, their calibration and the database are what they were, step for step; the times of
    requests that had ended are kept, too."""
    rng = random.Random(7)
    sentences = [tuple(rng.choices(range(5, 40), k=12)) for _ in range(6)]
    answers = [sum(rng.choices(sentences, k=rng.randrange(1, 6)), ()) for _ in range(9)]
    rows = _rows(*answers[:4], (), *answers[4:], (5,))

    def run(path: Path | None, stops_after: int | None = None) -> ReplayResult:
        database = ModelDatabase(1 << 20)
        made = [drafter(DraftResources(100, database))]
        replay = Replay(made, database, mode, 8, 24, concurrency)
        if mode is ReplayMode.WARM:
            replay.fill(_rows(answers[0][::-1], answers[3]))
        num_ended = 0

        def note() -> None:
            nonlocal num_ended
            num_ended += 1
            if num_ended == stops_after:
                raise _Stop

        replay.run(rows, note, Journal(path, {"a": 1}))
        assert num_ended == len(rows)
        return replay.result

    def facts(result: ReplayResult) -> dict[str, object]:
        return {key: value for key, value in result.as_json().items() if "latency" not in key}

    wanted = facts(run(None))
    for stops_after in (1, 4, 9):
        path = tmp_path / f"{stops_after}"
        with pytest.raises(_Stop):
            run(path, stops_after)
        kept = units(path.with_suffix(".unfinished"))
        assert len(kept) == stops_after
        found = run(path)
        assert facts(found) == wanted
        kept_times = {step[-2] for request in kept.values() for step in request["steps"]}
        assert kept_times <= set(found.draft_s)


VOCAB_SIZE = 300


class Strict(OracleDrafter):
    """Counts on what the engine promises: as many choices as accepted nodes, of the vocabulary."""

    def observe(
        self, seq: Sequence, tree: DraftTree, acceptance: Acceptance, forward: Forward | None
    ) -> None:
        assert len(acceptance.path) == len(acceptance.token_ids)
        assert max(tree.token_ids) < VOCAB_SIZE
        chosen = [acceptance.token_ids[tree.depths[node] - 1] for node in acceptance.path[1:]]
        assert chosen == [tree.token_ids[node] for node in acceptance.path[1:]]


def test_drafters_see_what_the_engine_would_show_them(tmp_path: Path) -> None:
    """Also in an answer that ends on a drafted token, and after an interruption."""
    answer = (5, VOCAB_SIZE - 1, 7, 8, VOCAB_SIZE - 1, 2)
    rows = [ReplayRow("r", "t", (1, 3, 4), answer) for _ in range(2)]

    def run(path: Path, on_row: Callable[[], None]) -> int:
        futures = {f"r#{number}": [1, 3, 4, *answer] for number in range(len(rows))}
        drafters = [Strict(futures), JunkDrafter(VOCAB_SIZE)]
        replay = Replay(drafters, ModelDatabase(1 << 20), ReplayMode.COLD, 8, 2)
        replay.run(rows, on_row, Journal(path, {}))
        return replay.result.num_steps

    def stop() -> None:
        raise _Stop

    def go_on() -> None:
        pass

    wanted = run(tmp_path / "whole", go_on)
    with pytest.raises(_Stop):
        run(tmp_path / "broken", stop)
    assert run(tmp_path / "broken", go_on) == wanted


def test_the_command_goes_on(tmp_path: Path) -> None:
    """After a real Ctrl-C, with the figures of a replay that was not interrupted."""
    rng = random.Random(3)
    sentences = [tuple(rng.choices(range(5, 90), k=40)) for _ in range(30)]
    answers = [sum(rng.choices(sentences, k=20), ()) for _ in range(200)]
    evaluate = _write(tmp_path / "eval.jsonl", _rows(*answers))
    fill = _write(tmp_path / "fill.jsonl", _rows(*answers[:5]))
    command = ["bench", "replay", "--eval", str(evaluate), "--fill", str(fill), "--mode", "warm"]

    def run(name: str, *options: str) -> dict[str, Any]:
        arguments = [*command, "--json", str(tmp_path / name), *options]
        outcome = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert outcome.exit_code == 0
        found = json.loads((tmp_path / name).read_text())
        return {key: value for key, value in found.items() if "latency" not in key}

    wanted = run("whole.json")
    journal = tmp_path / "out.json.unfinished"
    told = interrupt_after(3, journal, *command, "--json", str(tmp_path / "out.json"))
    assert "interrupted; the same command keeps what was finished" in told
    assert 3 <= len(units(journal)) < len(answers)
    with pytest.raises(ConfigError, match="budget was 16, is 4"):
        run("out.json", "--budget", "4")
    assert run("out.json") == wanted | {"interruptions": 1}
    assert not journal.exists()


def test_a_file_without_requests_is_an_error(tmp_path: Path) -> None:
    """Not a table of zeros."""
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ConfigError, match="no recorded request"):
        CliRunner().invoke(app, ["bench", "replay", "--eval", str(empty)], catch_exceptions=False)
    evaluate = _write(tmp_path / "eval.jsonl", _rows(ANSWER))
    command = ["bench", "replay", "--eval", str(evaluate), "--mode", "warm", "--fill", str(empty)]
    with pytest.raises(ConfigError, match=r"empty\.jsonl: there is no recorded request"):
        CliRunner().invoke(app, command, catch_exceptions=False)

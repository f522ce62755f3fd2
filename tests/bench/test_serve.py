"""The load client against a real HTTP server that answers as it is told."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from deployments.metrics.catalogue import LAST_POSITION
from hdserve.bench.load import Load, LoadPlan, arrange, arrivals_s, run_load
from hdserve.bench.openai_client import OpenAIClient
from hdserve.bench.request_record import Outcome, RequestRecord
from hdserve.bench.serve import as_result
from hdserve.bench.spec_decode import COLLECTING_POSITION, read_draft_totals
from hdserve.cli import bench_serve_job
from hdserve.cli.commands import app
from hdserve.errors import ConfigError
from hdserve.prompts import PromptRow
from tests.bench.stand_in import ALIAS, MODEL, StandIn
from tests.interruption import interrupt_after, interrupt_when, units
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def metrics_are_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in tells them as they are, so nobody in this process waits for newer ones."""
    monkeypatch.setattr(bench_serve_job, "_METRICS_AGE_S", 0.0)


@pytest.fixture
def server() -> Iterator[StandIn]:
    with closing(StandIn()) as running:
        yield running


def bench(server: StandIn, directory: Path, texts: list[str], *options: str) -> tuple[int, Any]:
    """Exit status and results of a run over ``texts``."""
    prompts, found = directory / "prompts.jsonl", directory / "out.json"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    arguments = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    outcome = CliRunner().invoke(app, [*arguments, "--json", str(found), *options])
    return outcome.exit_code, json.loads(found.read_text())["results"]


def test_answers_are_counted_and_timed(server: StandIn, tmp_path: Path) -> None:
    """Tokens as the server says, times from the chunks with text, drafts from ``/metrics``."""
    options = ("--concurrency", "1,3", "--api-key", "secret", "--num-prompts", "7", "--detailed")
    status, (one, three) = bench(server, tmp_path, ["good 1", "good 2"], *options)
    assert status == 0
    assert (one["completed"], one["rejected"], one["failed"]) == (7, 0, 0)
    assert one["model_id"] == MODEL
    assert (one["total_input_tokens"], one["total_output_tokens"]) == (35, 42)
    assert one["output_throughput"] == pytest.approx(42 / one["duration"])
    assert one["generated_texts"] == ["caf\u00e9 bar"] * 7
    assert [len(gaps) for gaps in one["itls"]] == [1] * 7
    assert one["mean_ttft_ms"] + one["mean_itl_ms"] <= one["mean_e2el_ms"]
    assert one["mean_tpot_ms"] == pytest.approx((one["mean_e2el_ms"] - one["mean_ttft_ms"]) / 5)
    assert one["median_engine_ttft_ms"] is None  # this server does not say
    assert one["max_concurrent_requests"] == 1
    assert 1 < three["max_concurrent_requests"] <= 3
    assert server.max_num_open == 3
    assert one["spec_decode_num_drafts"] == 4 * 7
    assert one["spec_decode_acceptance_rate"] == pytest.approx(30.0)
    assert one["spec_decode_acceptance_length"] == pytest.approx(2.5)
    assert one["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    seeds = Counter(body.get("seed") for body in server.bodies)
    assert seeds == {None: 1, **dict.fromkeys(range(7), 2)}


def test_drafts_are_counted_where_an_alias_is_asked(server: StandIn, tmp_path: Path) -> None:
    """A server counts them by the name that the alias stands for."""
    _, (row,) = bench(server, tmp_path, ["good"], "--concurrency", "1", "--model", ALIAS)
    assert {body["model"] for body in server.bodies} == {ALIAS}
    assert row["spec_decode_num_drafts"] == 4


def test_metrics_that_cannot_be_read_once_cost_one_load_its_figures(
    server: StandIn, tmp_path: Path
) -> None:
    server.unreadable_metrics = {0}
    _, rows = bench(server, tmp_path, ["good"], "--concurrency", "1,2,3")
    assert [row.get("spec_decode_num_drafts") for row in rows] == [None, 4, 4]


def test_every_end_has_its_count(server: StandIn, tmp_path: Path) -> None:
    """Refused is not failed; cut off, an error in mid-stream and status 500 are."""
    texts = ["good", "full", "broken", "cut", "failing", "full"]
    status, (row,) = bench(server, tmp_path, texts, "--concurrency", "2", "--detailed")
    assert status == 1
    assert (row["completed"], row["rejected"], row["failed"]) == (1, 2, 3)
    assert row["total_output_tokens"] == 6
    errors = sorted(error for error in row["errors"] if error)
    assert errors[0].startswith("429")
    assert errors[2].startswith("500")
    assert errors[3] == "the stream was cut off"
    assert "the engine stopped" in errors[4]
    assert row["failures"] == dict.fromkeys(errors[2:], 1)


def test_where_all_are_refused_nothing_was_measured(server: StandIn, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["full"]}\n' * 2)
    arguments = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    outcome = CliRunner().invoke(app, [*arguments, "--concurrency", "2"])
    assert outcome.exit_code == 1
    told = "none completed at concurrency 2: nothing was measured; rejected: 429: {"
    assert f'{told}"error": {{"message": "full"}}}}' in outcome.stderr


def test_it_says_why_requests_failed(server: StandIn, tmp_path: Path) -> None:
    """The commonest reason first, with the number of those it ended."""
    prompts = tmp_path / "prompts.jsonl"
    texts = ["cut", "failing", "cut", "good"]
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    arguments = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    outcome = CliRunner().invoke(app, [*arguments, "--concurrency", "2"])
    assert outcome.exit_code == 1
    first, second = [line for line in outcome.stderr.splitlines() if "failed at" in line]
    assert first == "2 failed at concurrency 2: the stream was cut off"
    assert second == "1 failed at concurrency 2: {'message': 'the engine stopped'}"


def test_answers_without_usage_are_told(server: StandIn, tmp_path: Path) -> None:
    """Their chunks are counted, which may hold several tokens each."""
    prompts = tmp_path / "prompts.jsonl"
    arguments = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    for texts, num_lines in ((["good"], 0), (["uncounted", "good", "uncounted"], 1)):
        prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
        outcome = CliRunner().invoke(app, [*arguments, "--concurrency", "1"])
        assert outcome.exit_code == 0
        told = "2 answered without usage at concurrency 1: their chunks are counted as tokens"
        assert outcome.stderr.count(told) == outcome.stderr.count("usage") == num_lines


def test_what_is_sent(server: StandIn, tmp_path: Path) -> None:
    """Sampling, length and further fields are in every request."""
    extra = '{"speculation": {"enabled": false}}'
    options = ("--max-tokens", "9", "--temperature", "0.5", "--ignore-eos", "--extra-body", extra)
    bench(server, tmp_path, ["good"], "--concurrency", "1", *options)
    assert [body["max_completion_tokens"] for body in server.bodies] == [1, 9]
    for body in server.bodies:
        assert body["temperature"] == 0.5
        assert body["ignore_eos"] is True
        assert body["speculation"] == {"enabled": False}
        assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("extra", ["{}", '{"min_tokens": 3}'])
def test_the_first_request_asks_what_no_load_asks(
    server: StandIn, tmp_path: Path, extra: str
) -> None:
    """A server may draft from its answer, and has its prompt in its cache; it is short, unless the
    server would refuse that."""
    options = ("--concurrency", "1", "--max-tokens", "9", "--extra-body", extra)
    _, (row,) = bench(server, tmp_path, ["good 1", "good 2"], *options)
    first, *others = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(others) == ["good 1", "good 2"]
    assert first not in others
    assert server.bodies[0]["max_completion_tokens"] == (9 if "min_tokens" in extra else 1)
    assert row["num_repeated_prompts"] == 0


@pytest.mark.parametrize("status", [400, 422])
def test_a_first_request_that_is_too_short_is_sent_as_the_others_are(
    server: StandIn, tmp_path: Path, status: int
) -> None:
    server.fewest_tokens, server.refusing_status = 8, status
    _, (row,) = bench(server, tmp_path, ["good"], "--concurrency", "1", "--max-tokens", "9")
    assert row["completed"] == 1
    assert [body["max_completion_tokens"] for body in server.bodies] == [1, 9, 9]


def test_a_first_request_that_fails_as_the_others_would_is_told(
    server: StandIn, tmp_path: Path
) -> None:
    """Not what was wrong with a shorter one."""
    server.fewest_tokens = 10
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["good"]}\n')
    arguments = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    with pytest.raises(ConfigError, match="9 tokens are too few"):
        CliRunner().invoke(app, [*arguments, "--max-tokens", "9"], catch_exceptions=False)


def test_warmups_are_not_measured(server: StandIn, tmp_path: Path) -> None:
    """They are as long as the others, at as many a time, ask what no load asks, and come before
    the server's counts of drafts are read."""
    options = ("--concurrency", "1,3", "--num-warmups", "5", "--max-tokens", "9")
    _, (row, other) = bench(server, tmp_path, ["good 1", "good 2"], *options)
    texts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(texts) == 1 + 5 + 2 + 2
    assert {*texts[:6]}.isdisjoint({"good 1", "good 2"})
    assert [body["max_completion_tokens"] for body in server.bodies[1:6]] == [9] * 5
    assert (row["num_warmups"], row["completed"], other["completed"]) == (5, 2, 2)
    assert (row["num_repeated_prompts"], row["spec_decode_num_drafts"]) == (0, 4 * 2)


def test_goodput(server: StandIn, tmp_path: Path) -> None:
    """All are good within an hour, none within no time."""
    for bound, share in (("e2el:3600000", 1.0), ("ttft:0,tpot:10000", 0.0)):
        options = ("--concurrency", "2", "--goodput", bound)
        _, (row,) = bench(server, tmp_path, ["good"] * 3, *options)
        assert row["request_goodput"] == pytest.approx(share * row["request_throughput"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--concurrency", "0"), "--concurrency"),
        (("--api", "responses"), "--api"),
        (("--base-url", "localhost:9"), "--base-url begins with http"),
        (("--api-key", "a\r"), "--api-key has a line end"),
        (("--extra-body", "[1]"), "--extra-body"),
        (("--goodput", "itl:3"), "--goodput"),
        (("--goodput", "ttft:nan"), "--goodput"),
        (("--goodput", "ttft:inf"), "--goodput"),
        (("--goodput", "ttft:5,e2el:-1"), "--goodput"),
        (("--request-rate", "0"), "--request-rate"),
        (("--request-rate", "nan"), "--request-rate"),
        (("--burstiness", "inf"), "--burstiness"),
        (("--burstiness", "nan"), "--burstiness"),
        (("--timeout-s", "inf"), "--timeout-s must be finite"),
    ],
)
def test_wrong_options_are_named(
    server: StandIn, tmp_path: Path, options: tuple[str, str], reason: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["good"]}\n')
    arguments = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    outcome = CliRunner().invoke(app, [*arguments, *options])
    assert reason in str(outcome.exception)
    assert server.bodies == []


@pytest.mark.parametrize(
    ("place", "reason"), [(None, "ClientConnectorError: Cannot connect"), ("/none", "404: ")]
)
def test_a_server_that_cannot_be_asked_is_told(
    server: StandIn, tmp_path: Path, place: str | None, reason: str
) -> None:
    """With what it answers, or why it does not."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["good"]}\n')
    base_url = "http://127.0.0.1:1" if place is None else server.base_url + place
    arguments = ["bench", "serve", "--base-url", base_url, "--prompts", str(prompts)]
    with pytest.raises(ConfigError, match=f"/v1/models cannot be read: {reason}"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_interrupted_it_keeps_what_it_has(server: StandIn, tmp_path: Path) -> None:
    """Ctrl-C while requests are under way: their streams are closed, the others are in the file."""
    prompts, found = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    texts = ["good", "good", "good", *["endless"] * 20]
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    command = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    command += ["--json", str(found), "--concurrency", "20,1"]
    num_sent = 1 + 3 + 20  # so the good ones, and the first, have made room
    interrupt_when(lambda: server.num_open == 20 and len(server.bodies) == num_sent, *command)
    (row,) = json.loads(found.read_text())["results"]
    assert row["interrupted"]
    assert (row["completed"], row["rejected"], row["failed"]) == (3, 0, 0)
    eventually(lambda: not server.num_open)


@pytest.mark.parametrize("num_before", [0, 1])
def test_interrupted_without_a_file_it_says_which_command_could_go_on(
    server: StandIn, tmp_path: Path, num_before: int
) -> None:
    """The same one, with a file for its result, whatever its words have in them; in the first
    request as well as later."""
    prompts = tmp_path / "my prompts [old].jsonl"
    prompts.write_text('{"turns": ["good"]}\n')
    server.num_answered_to_end = num_before
    command = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    options = ["--api-key", "a-secret", "--json", "--concurrency", "1"]
    told = interrupt_when(lambda: server.num_open == 1, *command, *options)
    assert "a-secret" not in told
    (line,) = [line for line in told.splitlines() if line.startswith("interrupted")]
    assert "nothing was kept" in line
    name, *words = shlex.split(line.partition(": ")[2])
    shown = ["--api-key=...", "--concurrency", "1", "--json", "FILE"]
    assert (name, words) == ("hdserve", [*command, *shown])


def test_interrupted_before_the_first_load_an_earlier_result_stays(
    server: StandIn, tmp_path: Path
) -> None:
    """Nothing was measured that could take its place."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["good"]}\n')
    out.write_text("earlier")
    server.num_answered_to_end = 1
    command = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    command += ["--json", str(out), "--concurrency", "1", "--num-warmups", "1"]
    interrupt_when(lambda: len(server.bodies) == 2, *command)
    assert out.read_text() == "earlier"


def test_an_interruption_ends_the_question_for_other_names(server: StandIn, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["good"]}\n')
    server.is_listing_endless = True
    command = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    interrupt_when(lambda: server.num_listings_begun == 1, *command, "--model", MODEL)
    assert len(server.bodies) == 1


def test_prompts_that_were_asked_before_an_interruption_come_again(
    server: StandIn, tmp_path: Path
) -> None:
    """So those of the load that is measured anew are counted."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(f'{{"turns": ["good {n}"]}}\n' for n in range(9)))
    command = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    command += ["--json", str(out), "--concurrency", "1,2,1", "--num-prompts", "4"]
    for num_answered in (1 + 4 + 1, 1 + 1):  # with a load of 4, and then without it
        server.bodies.clear()
        server.num_answered_to_end = num_answered
        num_sent = num_answered + 2
        interrupt_when(lambda sent=num_sent: len(server.bodies) == sent, *command)  # type: ignore[misc]
    server.num_answered_to_end = None
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    rows = json.loads(out.read_text())["results"]
    assert [row["num_repeated_prompts"] for row in rows] == [0, 3, 3]
    assert [row["completed"] for row in rows] == [4, 4, 4]


def test_interrupted_it_goes_on(server: StandIn, tmp_path: Path) -> None:
    """A load that had ended is not sent again; the one that was interrupted is, as a whole."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["good"]}\n' * 4)
    command = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    command += ["--json", str(out), "--concurrency"]
    server.num_answered_to_end = 1 + 4  # the first one warms the server
    journal = tmp_path / "out.json.unfinished"
    told = interrupt_after(1, journal, *command, "2,1,3")
    assert "interrupted; the same command keeps what was finished" in told
    (kept,) = units(journal).values()
    first, *others = json.loads(out.read_text())["results"]
    assert first == kept
    assert [row["interrupted"] for row in others] == [True] * len(others)
    with pytest.raises(ConfigError, match=r"other settings.*plans"):
        CliRunner().invoke(app, [*command, "2"], catch_exceptions=False)
    server.num_answered_to_end = None
    server.bodies.clear()
    outcome = CliRunner().invoke(app, [*command, "2,1,3"], catch_exceptions=False)
    assert outcome.exit_code == 0
    found = json.loads(out.read_text())
    assert found["interruptions"] == 1
    assert found["results"][0] == kept
    assert [row["max_concurrency"] for row in found["results"]] == [2, 1, 3]
    assert [row["completed"] for row in found["results"]] == [4, 4, 4]
    assert len(server.bodies) == 1 + 4 + 4
    assert not journal.exists()


@pytest.mark.parametrize("num_answered", [0, 1])
def test_interrupted_between_loads(server: StandIn, tmp_path: Path, num_answered: int) -> None:
    """Ctrl-C while ``/metrics`` does not answer: a load that had ended is kept."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["good"]}\n' * 4)
    command = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    command += ["--json", str(out), "--concurrency", "2,1"]
    server.num_metrics_answered = num_answered
    told = interrupt_when(lambda: server.num_metrics_asked > num_answered, *command)
    assert "interrupted; the same command keeps what was finished" in told
    rows = json.loads(out.read_text())["results"]
    assert [row["completed"] for row in rows] == [4] * num_answered
    server.num_metrics_answered = sys.maxsize
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    rows = json.loads(out.read_text())["results"]
    assert [row["completed"] for row in rows] == [4, 4]
    assert len(server.bodies) == 2 + 4 + 4


def test_each_load_goes_on_in_the_order_of_the_prompts(server: StandIn, tmp_path: Path) -> None:
    """Only when all were asked they come again, and that is counted."""
    texts = [f"good {number}" for number in range(7)]
    options = ("--concurrency", "1,2,3,2", "--num-prompts", "3", "--detailed")
    _, rows = bench(server, tmp_path, texts, *options)
    names = [row["names"] for row in rows]
    assert len({name for load in names[:2] for name in load}) == 6
    assert len({name for load in names[:3] for name in load}) == 7
    assert [row["num_repeated_prompts"] for row in rows] == [0, 0, 2, 3]


def test_rows_that_ask_the_same_are_one_prompt(server: StandIn, tmp_path: Path) -> None:
    options = ("--concurrency", "1,2", "--num-prompts", "2")
    _, rows = bench(server, tmp_path, ["good", "good", "good", "good 1"], *options)
    assert sum(row["num_repeated_prompts"] for row in rows) == 2


def test_a_concurrency_that_cannot_be_reached_is_told(server: StandIn, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["good"]}\n' * 2)
    command = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    told = CliRunner().invoke(app, [*command, "--concurrency", "1,3,4"], catch_exceptions=False)
    for most in (3, 4):
        assert f"--concurrency {most} is never reached, only 2" in told.stderr
    told = CliRunner().invoke(app, [*command, "--concurrency", "1,2"], catch_exceptions=False)
    assert "reached" not in told.stderr


def test_arrivals_keep_rate_and_burstiness() -> None:
    """Poisson by default; burstier gaps vary more at the same mean; the seed decides."""
    gaps = {}
    for burstiness in (0.25, 1.0, 4.0):
        plan = LoadPlan(1, 20_000, request_rate=8.0, burstiness=burstiness, seed=3)
        gaps[burstiness] = np.diff([0.0, *arrivals_s(plan)])
        assert gaps[burstiness].mean() == pytest.approx(1 / 8, rel=0.05)
        spread = gaps[burstiness].std() / gaps[burstiness].mean()
        assert spread == pytest.approx(burstiness**-0.5, rel=0.05)
    assert arrivals_s(LoadPlan(1, 9, 2.0, seed=1)) == arrivals_s(LoadPlan(1, 9, 2.0, seed=1))
    assert arrivals_s(LoadPlan(1, 9, 2.0, seed=1)) != arrivals_s(LoadPlan(1, 9, 2.0, seed=2))


def test_times_count_from_the_arrival(server: StandIn) -> None:
    """At a rate, what waits until others have ended has begun to wait already."""
    plan = LoadPlan(1, 5, request_rate=1000.0)
    rows = [PromptRow(f"good {number}", "all", f"good {number}") for number in range(5)]

    async def load() -> Load:
        async with OpenAIClient(server.base_url, "chat", {"model": "m"}) as client:
            stop = asyncio.Event()
            return await run_load(client, rows, plan, stop=stop, progress=lambda _: None)

    found = asyncio.run(load())
    begun = sorted(record.started_s for record in found.records)
    assert np.diff(begun) == pytest.approx(np.diff(arrivals_s(plan)))
    assert as_result(found)["max_concurrent_requests"] == 1


def test_prompts_come_again_when_they_run_out() -> None:
    rows = [PromptRow(name, "all", name) for name in "abc"]
    names = [row.name for row in arrange(rows, LoadPlan(1, 7, seed=5))]
    assert Counter(names) == {names[0]: 3, names[1]: 2, names[2]: 2}
    assert names[:3] == names[3:6]


def test_conversations_are_chats(server: StandIn, tmp_path: Path) -> None:
    """They are sent as they are; as completions they cannot be."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go on."}]
    rows = [{"messages": chat}, {"prompt": "Hello."}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["bench", "serve", "--base-url", server.base_url, "--prompts", str(prompts)]
    command += ["--concurrency", "1"]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    sent = [body["messages"] for body in server.bodies]
    assert sorted(map(len, sent[1:])) == [1, 2]
    assert chat in sent[1:]
    with pytest.raises(ConfigError, match="rows with `messages` need --api chat"):
        CliRunner().invoke(app, [*command, "--api", "completions"], catch_exceptions=False)


def test_peaks_come_from_the_times() -> None:
    """Two answers of 8 tokens, in two chunks each: 12 tokens in second 5, never three at once."""

    def record(started_s: float, *chunk_times_s: float) -> RequestRecord:
        made = RequestRecord("a", started_s, Outcome.COMPLETED, chunk_times_s[-1])
        made.chunk_times_s, made.num_output_tokens = list(chunk_times_s), 8
        return made

    records = [record(4.0, 4.5, 5.1), record(4.2, 5.2, 5.3), record(5.3, 7.0)]
    result = as_result(Load(LoadPlan(9, 3), records, duration_s=3.0))
    assert result["max_output_tokens_per_s"] == 12
    assert result["max_concurrent_requests"] == 2
    assert result["request_goodput"] is None
    assert result["median_ttft_ms"] == pytest.approx(1000.0)


def test_a_server_without_drafts_has_no_totals() -> None:
    text = "# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total 3\n"
    assert read_draft_totals(text, {MODEL}) is None


def test_totals_are_those_of_one_model() -> None:
    """Of all its replicas, and without what is no count."""
    name = "vllm:spec_decode_num_drafts"
    lines = [
        f"# TYPE {name}_total counter",
        f'{name}_total{{model_name="{MODEL}",engine="a"}} 4',
        f'{name}_total{{model_name="{MODEL}",engine="b"}} 3',
        f'{name}_total{{model_name="other",engine="c"}} 100',
        f"# TYPE {name}_created gauge",
        f'{name}_created{{model_name="{MODEL}",engine="a"}} 1.7e9',
        "# TYPE vllm:prompt_tokens_total counter",
        f'vllm:prompt_tokens_total{{model_name="{MODEL}",engine="a"}} 50',
    ]
    totals = read_draft_totals("\n".join(lines) + "\n", {MODEL, "an alias"})
    assert totals is not None
    assert (totals.num_drafts, totals.num_draft_tokens) == (7, 0)


@pytest.mark.parametrize(("others", "num_rates"), [((), 18), (("hdserve_steps_total",), 16)])
def test_what_is_deeper_is_no_share_of_the_drafts(others: tuple[str, ...], num_rates: int) -> None:
    """Of hdserve the last position collects it; other servers count each position by itself."""
    assert COLLECTING_POSITION == LAST_POSITION
    name = "vllm:spec_decode_num"
    lines = [
        *(f"# TYPE {other} counter\n{other} 5" for other in others),
        f"# TYPE {name}_drafts_total counter\n{name}_drafts_total 10",
        f"# TYPE {name}_draft_tokens_total counter\n{name}_draft_tokens_total 400",
        f"# TYPE {name}_accepted_tokens_per_pos_total counter",
    ]
    for position in range(COLLECTING_POSITION + 1 if others else 18):
        count = 30 if others and position == COLLECTING_POSITION else 5
        lines.append(f'{name}_accepted_tokens_per_pos_total{{position="{position}"}} {count}')
    totals = read_draft_totals("\n".join(lines) + "\n", {MODEL})
    assert totals is not None
    rates = totals.as_result()["spec_decode_per_position_acceptance_rates"]
    assert rates == [0.5] * num_rates

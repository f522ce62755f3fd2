"""One engine step after another: outputs, counters, and steps that are cut short."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
import pytest

from hdserve import core
from hdserve.config import DraftingConfig, EngineConfig, ModelConfig
from hdserve.core import FinishReason, Source, SpeculationParams, StepOutput
from hdserve.engine import engine as engine_module
from hdserve.engine.build import build_engine
from hdserve.engine.engine import Engine
from hdserve.engine.loading.loader import prepare_model
from hdserve.engine.scheduling.scheduler import Scheduler
from hdserve.engine.stats import add_counts
from hdserve.errors import HdserveError
from tests.drafters import InterruptedDrafter, OracleDrafter
from tests.engine.counted_queue import CountedQueue
from tests.engine.helpers import GREEDY, RecordingDrafter, plain
from tests.engines import make_engine, make_prompt, make_sequence, plain_tokens, run
from tests.interruption import traced
from tests.models import make_model


def test_numbers_of_numpy_are_numbers() -> None:
    """Drafters are given Python's, which know more."""
    seq = make_sequence("a", make_prompt(5), max_tokens=np.int64(7))
    make_engine().add(seq)
    assert type(seq.max_total_tokens) is int


def test_abort_frees_slot_and_drafters() -> None:
    """An aborted sequence is gone before the next step, running or waiting, started or not."""
    drafter = RecordingDrafter({name: [] for name in "abc"})
    finished: list[tuple[str, FinishReason | None]] = []
    loaded = prepare_model(make_model(), EngineConfig())
    config = ModelConfig(
        name="t",
        model="t",
        engine=EngineConfig(max_num_sequences=1, kv_cache_tokens=512, exact=False),
        drafting=DraftingConfig(adapts_budget=False),
    )
    engine = build_engine(
        config,
        loaded,
        (drafter,),
        on_finish=lambda seq: finished.append((seq.request_id, seq.finish_reason)),
    )
    for name in "abc":
        engine.add(make_sequence(name, make_prompt(5)))
    engine.step()
    engine.abort("b")
    engine.abort("a")
    engine.abort("unknown")
    assert (engine.stats.num_running, engine.stats.num_waiting) == (0, 1)
    assert engine.stats.kv_cache_usage == 0.0
    run(engine, [])
    assert finished == [
        ("b", FinishReason.ABORT),
        ("a", FinishReason.ABORT),
        ("c", FinishReason.LENGTH),
    ]
    started = [name for call, name in drafter.calls if call == "start"]
    assert started == [name for call, name in drafter.calls if call == "finish"] == ["a", "c"]


def test_ending_one_looks_at_nobody_who_waits() -> None:
    """However many wait, and if it waits itself: who ends a large call names all that it ever asked
    for."""
    engine = make_engine(max_num_sequences=1)
    run(engine, [make_sequence("ended", make_prompt(4))])
    for name in "abc":
        engine.add(make_sequence(name, make_prompt(4)))
    engine.step()
    waiting = engine._scheduler.waiting = CountedQueue(engine._scheduler.waiting)
    assert [seq.request_id for seq in [*waiting]] == ["b", "c"]
    waiting.num_read = 0
    for request_id in ("ended", "unknown", "b"):
        engine.abort(request_id)
    assert waiting.num_read == 0
    assert (engine.stats.num_running, engine.stats.num_waiting) == (1, 1)


def test_a_failing_listener_stops_nobody() -> None:
    """What is done with finished outputs serves later drafts; when it fails, decoding goes on."""

    def fail(seq: core.Sequence) -> None:
        raise RuntimeError("the listener failed")

    config = ModelConfig(name="t", model="t", engine=EngineConfig(kv_cache_tokens=512, exact=False))
    engine = build_engine(config, prepare_model(make_model(), config.engine), (), on_finish=fail)
    sequences = [make_sequence(str(n), make_prompt(5)) for n in range(3)]
    run(engine, sequences)
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in sequences)
    assert engine.stats.num_drafter_failures == {("engine", "on_finish"): 3}


def test_outputs_say_where_tokens_came_from() -> None:
    """The outputs of a sequence are its tokens in order, each with its source: drafted as long as
    the drafts were right, the last one of a step decided without."""
    prompt = make_prompt(9)
    future = plain(prompt, temperature=0.8).token_ids
    seq = make_sequence("a", prompt, temperature=0.8)
    outputs = run(make_engine([OracleDrafter({"a": future})]), [seq])
    assert [token for output in outputs for token in output.token_ids] == seq.output_token_ids
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    for output in outputs[:-1]:
        assert output.sequence is seq
        assert len(output.sources) == len(output.token_ids)
        assert output.sources[-1] is Source.PLAIN
        assert set(output.sources[:-1]) <= {Source.OTHER}
    assert max(len(output.token_ids) for output in outputs) == 6
    assert outputs[-1].token_ids[-1] == seq.token_ids[-1]


def test_a_step_that_is_cut_short_has_drafted_tokens_alone() -> None:
    """Where the end comes among the accepted drafts, the last token is one of them, too."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY).token_ids
    stop = future[len(prompt) + 2]
    seq = make_sequence("a", prompt, **GREEDY, stop_token_ids=(stop,))
    (output,) = run(make_engine([OracleDrafter({"a": future})]), [seq])
    assert output.token_ids == tuple(future[len(prompt) : len(prompt) + 3])
    assert set(output.sources) == {Source.OTHER}


def test_logprobs_are_one_per_token() -> None:
    """Asked for, every output has the log probabilities of its own tokens; else none has any."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY).token_ids
    for num_top in (0, 3):
        seq = make_sequence("a", prompt, **GREEDY, logprobs=num_top)
        for output in run(make_engine([OracleDrafter({"a": future})]), [seq]):
            assert output.logprobs is not None
            assert [item.token_id for item in output.logprobs] == list(output.token_ids)
            assert {len(item.top) for item in output.logprobs} == {num_top}
    outputs = run(make_engine(), [make_sequence("a", prompt, **GREEDY)])
    assert all(output.logprobs is None for output in outputs)


def outputs_by_sequence(outputs: Iterable[StepOutput]) -> dict[str, list[StepOutput]]:
    found: dict[str, list[StepOutput]] = {}
    for output in outputs:
        found.setdefault(output.sequence.request_id, []).append(output)
    return found


def test_stats_add_up() -> None:
    """The engine's counters equal the sums over its sequences and over its outputs."""
    sequences = [make_sequence(str(n), make_prompt(4 + 13 * n, n), **GREEDY) for n in range(4)]
    futures = plain_tokens(make_model(), sequences)
    sequences[2] = make_sequence(
        "2", make_prompt(30, 2), SpeculationParams(is_enabled=False), **GREEDY
    )
    engine = make_engine([OracleDrafter(futures)])
    outputs = run(engine, sequences)
    stats, total = engine.stats, core.DraftCounts()
    for seq in sequences:
        add_counts(total, seq.counts)
    assert stats.drafts == total
    by_size = stats.num_steps_by_draft_tokens
    assert sum(by_size) == total.num_steps
    assert sum(by_size[1:]) == total.num_drafts
    assert sum(size * count for size, count in enumerate(by_size)) == total.num_draft_tokens
    assert stats.num_prompt_tokens == sum(seq.num_prompt_tokens for seq in sequences)
    assert stats.num_output_tokens == sum(seq.num_output_tokens for seq in sequences)
    assert stats.num_finished == {"length": 4}
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert stats.num_drafter_failures == {}
    assert stats.num_kv_tokens == 2048
    for name, own in outputs_by_sequence(outputs).items():
        counts = own[0].sequence.counts
        assert counts.num_steps == len(own)
        assert counts.num_steps + counts.num_accepted_tokens == own[0].sequence.num_output_tokens
        assert sum(counts.num_drafts_by_accepted) == counts.num_drafts <= counts.num_steps
        weighted = sum(n * count for n, count in enumerate(counts.num_drafts_by_accepted))
        assert weighted == counts.num_accepted_tokens
        assert sum(counts.accepted_by_source.values()) == counts.num_accepted_tokens
        assert sum(counts.draft_tokens_by_source.values()) == counts.num_draft_tokens
        assert (counts.num_drafts == 0) == (name == "2")


def test_an_idle_engine_does_nothing() -> None:
    """Without work a step gives nothing and counts nothing."""
    engine = make_engine()
    assert not engine.has_work
    assert engine.step() == []
    assert engine.stats.num_steps == 0


def test_prefill_steps_give_no_output() -> None:
    """While a prompt goes through in chunks there are no outputs; prompt tokens are counted."""
    engine = make_engine(prefill_chunk_tokens=8)
    engine.add(make_sequence("a", make_prompt(20), **GREEDY))
    assert engine.step() == []
    assert engine.step() == []
    assert engine.stats.num_prompt_tokens == 16
    (output,) = engine.step()
    assert len(output.token_ids) == 1
    assert engine.stats.num_prompt_tokens == 20


@pytest.mark.parametrize(
    ("call", "num_before"),
    [("start", 1), ("propose", 3), ("observe", 2), ("observe", 3), ("finish", 0), ("finish", 1)],
)
def test_an_interrupted_step_leaves_nothing_wrong(call: str, num_before: int) -> None:
    """What ran ends, and says so in the next step; what waits is answered; and what begins like
    the text whose step was interrupted gets the tokens it gets by itself."""
    prompts = {name: make_prompt(40, seed) for seed, name in enumerate("abc")}
    futures = {name: plain(prompt, **GREEDY).token_ids for name, prompt in prompts.items()}
    drafter = InterruptedDrafter(futures, call, num_before)
    engine = make_engine([drafter], max_num_sequences=2)
    sequences = [make_sequence(name, prompt, **GREEDY) for name, prompt in prompts.items()]
    first, second, third = sequences
    for seq in sequences:
        engine.add(seq)
    told: dict[str, list[StepOutput]] = {name: [] for name in prompts}

    def run_to_end() -> None:
        while engine.has_work:
            for output in engine.step():
                told[output.sequence.request_id].append(output)

    with pytest.raises(KeyboardInterrupt):
        run_to_end()
    run_to_end()
    for name, seq in zip("abc", sequences, strict=True):
        assert [bool(output.finish_reason) for output in told[name]].count(True) == 1
        assert told[name][-1].finish_reason is seq.finish_reason
        tokens = [token for output in told[name] for token in output.token_ids]
        assert tokens == seq.output_token_ids
    has_begun = (call, num_before) in [("start", 1), ("finish", 1)]
    assert third.finish_reason is (FinishReason.ERROR if has_begun else FinishReason.LENGTH)
    assert (third.num_output_tokens == 24) is not has_begun
    assert third.num_output_tokens > 0 or call == "start"
    assert third.token_ids == futures["c"][: len(third.token_ids)]
    assert engine.stats.num_running == 0
    assert engine.stats.num_drafter_sequences == 0
    for name, seq in zip("ab", (first, second), strict=True):
        assert seq.finish_reason in ("error", "length")
        if seq.finish_reason == "error":
            assert isinstance(told[name][-1].error, HdserveError)
        prompt = [*seq.token_ids[:-1], 3]
        (output,) = {id(out.sequence): out.sequence for out in _run_again(engine, prompt)}.values()
        assert output.token_ids == plain(prompt, **GREEDY).token_ids


def test_a_sequence_whose_addition_was_interrupted_can_be_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is kept of it."""
    engine, add = make_engine(), Scheduler.add

    def interrupt(*_: object) -> None:
        monkeypatch.setattr(Scheduler, "add", add)
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.add(make_sequence("a", make_prompt(4), **GREEDY))
    engine.abort("a")
    assert run(engine, [make_sequence("a", make_prompt(4), **GREEDY)])[-1].finish_reason == "length"


@pytest.mark.parametrize("is_told", [False, True])
def test_an_interrupted_sequence_has_the_tokens_that_were_told(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the interruption comes just before its output is there, or just after."""

    class Outputs(deque[StepOutput]):
        def append(self, output: StepOutput) -> None:
            is_third = output.sequence.num_output_tokens == 3
            if is_told or not is_third:
                super().append(output)
            if is_third and output.finish_reason is None:
                raise KeyboardInterrupt

    engine, seq = make_engine(), make_sequence("a", make_prompt(4), **GREEDY)
    monkeypatch.setattr(engine, "_outputs", Outputs())
    engine.add(seq)
    outputs: list[StepOutput] = []

    def run_to_end() -> None:
        while engine.has_work:
            engine.run()
            engine.hand_out(outputs.append)

    with pytest.raises(KeyboardInterrupt):
        run_to_end()
    run_to_end()
    assert seq.finish_reason is outputs[-1].finish_reason is FinishReason.ERROR
    assert seq.num_output_tokens == (3 if is_told else 2)
    assert [token for output in outputs for token in output.token_ids] == seq.output_token_ids


@pytest.mark.parametrize("is_aborted", [False, True])
def test_an_interruption_while_an_interrupted_step_ends(is_aborted: bool) -> None:
    """Everybody ends once all the same, and nothing is kept of anybody."""
    prompts = {name: make_prompt(4, seed) for seed, name in enumerate("abc")}
    futures = {name: plain(prompt, **GREEDY).token_ids for name, prompt in prompts.items()}
    engine = make_engine([InterruptedDrafter(futures, "finish", num_times=2)], max_num_sequences=3)
    for name, prompt in prompts.items():
        engine.add(make_sequence(name, prompt, **GREEDY))
    ended: list[str] = []

    def run_to_end() -> None:
        while engine.has_work:
            ended.extend(out.sequence.request_id for out in engine.step() if out.finish_reason)

    with pytest.raises(KeyboardInterrupt):
        run_to_end()
    if is_aborted:
        engine.abort("c")
    run_to_end()
    assert sorted(ended) == sorted("ab" if is_aborted else "abc")
    assert engine.stats.num_drafter_sequences == engine.stats.num_running == 0
    for name, prompt in prompts.items():
        assert run(engine, [make_sequence(name, prompt, **GREEDY)])[-1].finish_reason == "length"


def test_an_interruption_of_whatever_follows_another() -> None:
    """At any line after the first: who ran has ended, with the tokens that were told."""
    prompts = {name: make_prompt(4, seed) for seed, name in enumerate("ab")}
    futures = {name: plain(prompt, **GREEDY).token_ids for name, prompt in prompts.items()}
    for number in count():
        engine = make_engine([InterruptedDrafter(futures, "observe", 1)])
        sequences = [make_sequence(name, prompt, **GREEDY) for name, prompt in prompts.items()]
        for seq in sequences:
            engine.add(seq)
        outputs: list[StepOutput] = []

        def run_to_end(engine: Engine = engine, outputs: list[StepOutput] = outputs) -> None:
            while engine.has_work:
                outputs += engine.step()

        with _interrupted_again(number) as was_interrupted, pytest.raises(KeyboardInterrupt):
            run_to_end()
        run_to_end()
        for seq in sequences:
            told = [output for output in outputs if output.sequence is seq]
            tokens = [token for output in told for token in output.token_ids]
            assert (number, tokens) == (number, seq.output_token_ids)
            ends = [output.finish_reason for output in told if output.finish_reason is not None]
            assert (number, ends) == (number, [FinishReason.ERROR])
        assert engine.stats.num_drafter_sequences == engine.stats.num_running == 0
        if not was_interrupted:
            break
    assert number > 10


def test_an_interruption_while_sequences_are_admitted() -> None:
    """At any line: who had left the queue ends, who was still in it is answered, and nobody is
    lost."""
    prompts = {name: make_prompt(4, seed) for seed, name in enumerate("abcd")}
    params = {**GREEDY, "max_tokens": 4}
    futures = {name: plain(prompt, **params).token_ids for name, prompt in prompts.items()}
    for number in count():
        engine = make_engine(max_num_sequences=3)
        sequences = [make_sequence(name, prompt, **params) for name, prompt in prompts.items()]
        for seq in sequences:
            engine.add(seq)
        with _interrupted_while_admitting(number) as was_interrupted, suppress(KeyboardInterrupt):
            engine.run()
        ends = [output for output in run(engine, []) if output.finish_reason is not None]
        assert sorted(output.sequence.request_id for output in ends) == sorted(prompts)
        for seq in sequences:
            has_ended = seq.finish_reason is FinishReason.ERROR
            wanted = prompts[seq.request_id] if has_ended else futures[seq.request_id]
            assert (number, seq.token_ids) == (number, wanted)
        assert sequences[-1].finish_reason is FinishReason.LENGTH
        assert engine.stats.num_running == engine.stats.num_waiting == 0
        assert engine.stats.kv_cache_usage == 0.0
        if not was_interrupted:
            break
    assert number > 10


@contextmanager
def _interrupted_while_admitting(number: int) -> Iterator[list[bool]]:
    """``KeyboardInterrupt`` instead of the line of this number of what admits sequences; tells by
    a list with something in it whether there was one."""
    lines, found = count(), list[bool]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not Scheduler.admit.__code__:
            return None
        if event == "line" and next(lines) == number:
            found.append(True)
            raise KeyboardInterrupt
        return trace

    with traced(trace):
        yield found


@contextmanager
def _interrupted_again(number: int) -> Iterator[list[bool]]:
    """``KeyboardInterrupt`` instead of the line of this number of what the engine runs after one;
    tells by a list with something in it whether there was one."""
    lines, found, is_second = count(), list[bool](), list[bool]()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != engine_module.__file__:
            return None
        if event == "exception" and argument[0] is KeyboardInterrupt:
            is_second.append(True)
        if event == "line" and is_second and next(lines) == number:
            found.append(True)
            raise KeyboardInterrupt
        return trace

    with traced(trace):
        yield found


def _run_again(engine: Engine, prompt: list[int]) -> list[StepOutput]:
    off = SpeculationParams(is_enabled=False)
    return run(engine, [make_sequence("again", prompt, off, **GREEDY)])

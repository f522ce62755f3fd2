"""Each request that was accepted ends exactly once, whatever happens to it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from hdserve import core
from hdserve.core import MAX_INTEGER, FinishReason, SamplingParams, StepOutput
from hdserve.engine.async_engine import AsyncEngine
from hdserve.engine.engine import Engine
from hdserve.engine.kernels.draw import draw_token
from hdserve.errors import (
    HdserveError,
    InvalidRequest,
    Overloaded,
)
from tests.engine.async_engines import (
    LONG,
    GateDrafter,
    collect,
    eventually,
    make,
    run_async,
    started,
)
from tests.engine.helpers import GREEDY
from tests.engines import make_prompt, make_sequence, run


def raise_error(outputs: list[StepOutput]) -> None:
    """As a server does with the last output."""
    if outputs[-1].error is not None:
        raise outputs[-1].error


def test_streams_are_the_engines_outputs() -> None:
    """Requests that run together each get their own outputs, in order, equal to those alone."""

    async def test() -> None:
        sequences = [make_sequence(str(n), make_prompt(5 + n, n), seed=n) for n in range(6)]
        alone = [make_sequence(str(n), make_prompt(5 + n, n), seed=n) for n in range(6)]
        for seq in alone:
            run(make(), [seq])
        async with started() as engine:
            streams = await asyncio.gather(*(collect(engine, seq) for seq in sequences))
            assert engine.num_open == 0
        for outputs, seq, wanted in zip(streams, sequences, alone, strict=True):
            assert all(output.sequence is seq for output in outputs)
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens == wanted.output_token_ids
            reasons = [output.finish_reason for output in outputs]
            assert reasons == [None] * (len(reasons) - 1) + [FinishReason.LENGTH]

    run_async(test)


def test_closing_the_iterator_frees_the_slot() -> None:
    """A client that goes away after some output leaves a free engine, and no trace in it."""

    async def test() -> None:
        async with started() as engine:
            outputs = engine.generate(make_sequence("a", make_prompt(5), **LONG))
            await anext(outputs)
            assert (await engine.ask(lambda inner: inner.stats.num_running)) == 1
            await outputs.aclose()
            assert engine.num_open == 0
            stats = await engine.ask(lambda inner: inner.stats)
            assert (stats.num_running, stats.kv_cache_usage) == (0, 0.0)
            assert stats.num_finished == {"abort": 1}

    run_async(test)


def test_a_cancelled_task_frees_the_slot() -> None:
    """Cancelling the task that waits for outputs aborts its sequence, running or still waiting."""

    async def test() -> None:
        async with started(lambda: make(max_num_sequences=1)) as engine:
            tasks = [
                asyncio.create_task(collect(engine, make_sequence(name, make_prompt(5), **LONG)))
                for name in "ab"
            ]
            await eventually(lambda: engine.num_open == 2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert all(task.cancelled() for task in tasks)
            stats = await engine.ask(lambda inner: inner.stats)
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert engine.num_open == 0

    run_async(test)


def test_a_request_that_never_starts_is_no_request() -> None:
    """An iterator that nobody reads takes no place."""

    async def test() -> None:
        async with started() as engine:
            outputs = engine.generate(make_sequence("a", make_prompt(5)))
            assert engine.num_open == 0
            await outputs.aclose()
            assert engine.num_open == 0

    run_async(test)


def keep_room(engine: AsyncEngine, num_prompts: int, num_choices: int) -> None:
    with engine.room(num_prompts, num_choices):
        pass


def test_overload_is_refused_at_once(gate: GateDrafter) -> None:
    """One more than may be open or made ready is refused; those that are open finish, and their
    places are free again."""

    async def test() -> None:
        async with started(lambda: make(gate), max_num_open=2) as engine:
            gate.gate.clear()
            tasks = [
                asyncio.create_task(collect(engine, make_sequence(name, make_prompt(5))))
                for name in "ab"
            ]
            await eventually(lambda: engine.num_open == 2)
            with pytest.raises(Overloaded):
                await collect(engine, make_sequence("c", make_prompt(5)))
            assert engine.num_open == 2
            with pytest.raises(Overloaded):
                keep_room(engine, 1, 1)
            for num_prompts, num_choices, param in ((3, 1, "prompt"), (1, 3, "n"), (2, 2, "n")):
                with pytest.raises(InvalidRequest, match="at most 2 answers") as caught:
                    keep_room(engine, num_prompts, num_choices)
                assert caught.value.param == param
            gate.gate.set()
            for outputs in await asyncio.gather(*tasks):
                assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert len(await collect(engine, make_sequence("c", make_prompt(5)))) > 0
            with engine.room(1, 1):
                keep_room(engine, 1, 1)
                with pytest.raises(Overloaded):
                    keep_room(engine, 1, 2)
            keep_room(engine, 1, 2)

    run_async(test)


def test_an_invalid_request_loses_nothing() -> None:
    """A request the engine refuses gets the reason, its place is free, the others go on."""

    async def test() -> None:
        async with started(max_num_open=2) as engine:
            good = asyncio.create_task(collect(engine, make_sequence("a", make_prompt(5))))
            await asyncio.sleep(0)  # its first turn
            assert engine.num_open == 1
            for _ in range(3):
                with pytest.raises(InvalidRequest, match="vocabulary"):
                    await collect(engine, make_sequence("bad", [10**6]))
            assert (await good)[-1].finish_reason is FinishReason.LENGTH
            assert engine.num_open == 0

    run_async(test)


UNUSUAL: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": MAX_INTEGER},
    "a whole top_p": {"top_p": 1, "min_p": 1},
    "top_p": {"top_p": 1e-320},
    "no top_p": {"top_p": 0},
    "min_p": {"min_p": 1e-320},
    "cold": {"temperature": 5e-324},
    "penalty": {"repetition_penalty": 1e-320},
    "other penalties": {"presence_penalty": 1e-320, "frequency_penalty": -2.0},
    "biases": {"logit_bias": {0: 100.0, 1: -100.0, 2: 1e-320}},
    "biases of integers": {"logit_bias": {0: 100, 1: -100}},
    "numbers of NumPy": {
        "temperature": np.float32(0.9),
        "top_p": np.float64(0.9),
        "top_k": np.int64(9),
        "max_tokens": np.int64(4),
    },
    "seed": {"seed": 2**64 - 1},
    "negative seed": {"seed": -(2**63)},
    "tokens": {"min_tokens": MAX_INTEGER, "max_tokens": MAX_INTEGER},
    "drafts": {"speculation": core.SpeculationParams(max_draft_tokens=MAX_INTEGER)},
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_ends_of_ranges_are_answered(name: str) -> None:
    """Whatever the checks of the parameters let through has an answer, without another compiled
    version of the kernel that draws."""

    async def test() -> None:
        usual: dict[str, Any] = {"temperature": 0.9, "max_tokens": 4}
        async with started() as engine:
            await collect(engine, make_sequence("a", make_prompt(5), **usual))
            num_versions = len(draw_token.signatures)  # type: ignore[attr-defined]
            options = {**usual, **UNUSUAL[name]}
            outputs = await collect(engine, make_sequence("b", make_prompt(5), **options))
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            engine.check(max_silence_s=1000)
        assert len(draw_token.signatures) == num_versions  # type: ignore[attr-defined]

    run_async(test)


@pytest.mark.parametrize("options", [{"logit_bias": {"a": 1.0}}, {"stop_token_ids": 5}])
def test_what_nobody_checked_ends_one_request_alone(options: dict[str, Any]) -> None:
    """A value that a request cannot be begun or decoded with is an error of this request."""

    async def test() -> None:
        async with started() as engine:
            good = asyncio.create_task(collect(engine, make_sequence("a", make_prompt(5), **LONG)))
            for name in "bc":
                seq = make_sequence(name, make_prompt(5), **GREEDY)
                for param, value in options.items():
                    object.__setattr__(seq.params, param, value)
                with pytest.raises(HdserveError, match="log"):
                    raise_error(await collect(engine, seq))
            assert (await good)[-1].finish_reason is FinishReason.LENGTH
            assert engine.num_open == 0
            engine.check(max_silence_s=1000)

    run_async(test)


def test_an_id_in_use_is_refused_and_harms_nobody(gate: GateDrafter) -> None:
    """A second request with the id of a running one is refused; the first one gets its answer."""

    async def test() -> None:
        async with started(lambda: make(gate)) as engine:
            gate.gate.clear()
            first = asyncio.create_task(collect(engine, make_sequence("a", make_prompt(5))))
            await eventually(lambda: engine.num_open == 1)
            with pytest.raises(InvalidRequest, match="in use"):
                await collect(engine, make_sequence("a", make_prompt(7)))
            gate.gate.set()
            assert (await first)[-1].finish_reason is FinishReason.LENGTH

    run_async(test)


def test_an_id_can_be_used_again_in_mid_step(gate: GateDrafter) -> None:
    """A client that goes away and comes back with the same id, while the step that still works for
    the old request runs, gets the tokens of the new one alone."""

    async def test() -> None:
        async with started(lambda: make(gate)) as engine:
            gate.gate.clear()
            old = asyncio.create_task(collect(engine, make_sequence("a", make_prompt(5), **LONG)))
            await asyncio.to_thread(gate.is_waiting.wait)
            old.cancel()
            await asyncio.gather(old, return_exceptions=True)
            seq = make_sequence("a", make_prompt(9), **GREEDY)
            new = asyncio.create_task(collect(engine, seq))
            await eventually(lambda: engine.num_open == 1)
            gate.gate.set()
            assert all(output.sequence is seq for output in await new)
            alone = make_sequence("a", make_prompt(9), **GREEDY)
            run(make(), [alone])
            assert seq.token_ids == alone.token_ids

    run_async(test)


def test_commands_run_in_the_engines_thread() -> None:
    """``call`` and ``ask`` run between steps in the one thread that owns the engine; what fails
    there is logged, or goes to who asked, and decoding goes on."""

    async def test() -> None:
        async with started() as engine:
            names: list[str] = []
            engine.call(lambda inner: names.append(threading.current_thread().name))
            engine.call(lambda inner: [][0])
            with pytest.raises(ZeroDivisionError):
                await engine.ask(lambda inner: 1 // 0)
            with pytest.raises(InvalidRequest):
                await engine.ask(lambda inner: inner.add(core.Sequence("x", [], SamplingParams())))
            assert await engine.ask(lambda inner: threading.current_thread().name) == names[0]
            assert names == ["hdserve-engine"]
            assert (await collect(engine, make_sequence("a", make_prompt(5))))[-1].finish_reason

    run_async(test)


def test_what_must_be_soon_overtakes_what_may_wait() -> None:
    """And may fail just the same."""

    async def test() -> None:
        async with started() as engine:
            gate = threading.Event()
            obeyed: list[str] = []

            def take_all_time(_: Engine) -> None:
                gate.wait(60)
                time.sleep(0.006)

            engine.call(take_all_time)
            for _ in range(3):
                engine.call(lambda _: obeyed.append("late"))
            engine.call_soon(lambda _: [][0])
            engine.call_soon(lambda _: obeyed.append("soon"))
            gate.set()
            await eventually(lambda: len(obeyed) == 4)
            assert obeyed == ["soon", "late", "late", "late"]

    run_async(test)


def test_what_decoding_can_do_without_does_not_keep_it_waiting() -> None:
    """There are steps between such commands, as when a large database is delivered, however many
    come, and they are obeyed in order."""

    async def test() -> None:
        async with started() as engine:
            obeyed: list[int] = []

            def obey(number: int) -> None:
                time.sleep(0.006)
                obeyed.append(number)
                if number % 10 == 9 and number < num_commands:
                    order(number + 1)

            def order(first: int) -> None:
                for number in range(first, first + 10):
                    engine.call(lambda _, number=number: obey(number))  # type: ignore[misc]

            num_commands = 300
            order(0)
            outputs = await collect(engine, make_sequence("a", make_prompt(5), max_tokens=4))
            assert outputs[-1].finish_reason
            assert len(obeyed) < num_commands
            await eventually(lambda: len(obeyed) >= num_commands)
            assert obeyed == sorted(obeyed)

    run_async(test)

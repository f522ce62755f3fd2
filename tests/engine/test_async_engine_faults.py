"""Each request that was accepted ends exactly once, whatever happens to the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from hdserve.engine.async_engine import AsyncEngine
from hdserve.engine.engine import Engine
from hdserve.errors import ConfigError, EngineGone, EngineStopped
from tests.engine.async_engines import (
    LONG,
    GateDrafter,
    collect,
    eventually,
    make,
    run_async,
    started,
)
from tests.engines import make_prompt, make_sequence

STOPPED = "the engine has failed; the server's log says why"


class Panic(BaseException):
    """As extension modules in Rust raise it: no ``Exception``."""


@pytest.mark.parametrize(
    ("num_skipped_tokens", "panic"), [(1, None), (2, None), (0, Panic("a panic in an extension"))]
)
def test_a_failing_engine_ends_every_request_once(
    gate: GateDrafter, num_skipped_tokens: int, panic: Panic | None
) -> None:
    """When a step breaks, every open request gets ``EngineStopped``, once, everybody who comes
    later ``EngineGone``, and the owner is told when all that is done."""
    failed = threading.Event()

    async def test() -> None:
        async with started(lambda: make(gate), on_failure=failed.set) as engine:
            gate.gate.clear()
            ends: list[Exception] = []

            async def wait(name: str) -> None:
                try:
                    await collect(engine, make_sequence(name, make_prompt(5), **LONG))
                except EngineStopped as error:
                    ends.append(error)

            tasks = [asyncio.create_task(wait(name)) for name in "abc"]
            asked = asyncio.create_task(engine.ask(lambda inner: inner.stats))
            await eventually(lambda: engine.num_open == 3)
            await asyncio.to_thread(gate.is_waiting.wait)
            gate.num_skipped_tokens, gate.panic = num_skipped_tokens, panic
            gate.gate.set()
            await asyncio.gather(*tasks)
            assert len(ends) == 3
            assert all("the engine has failed" in str(error) for error in ends)
            assert engine.num_open == 0
            assert await asyncio.to_thread(failed.wait, 60)
            with pytest.raises(EngineGone):
                await collect(engine, make_sequence("d", make_prompt(5)))
            with pytest.raises(EngineStopped):
                await engine.ask(lambda inner: inner.stats)
            with pytest.raises(EngineStopped):
                engine.check(max_silence_s=1000)
            await asyncio.gather(asked, return_exceptions=True)

    run_async(test)


def test_a_question_the_engine_fails_with_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    """So are the others, everybody who waits for tokens, and the owner.  What the engine failed
    with, which may be what one of them sent, is told to the log alone."""
    failed = threading.Event()

    def panic(_engine: Engine) -> None:
        raise Panic("a panic in an extension")

    async def test() -> None:
        async with started(on_failure=failed.set) as engine:
            outputs = engine.generate(make_sequence("a", make_prompt(5), **LONG))
            await anext(outputs)
            asked = [asyncio.create_task(engine.ask(panic)) for _ in range(2)]
            for question in asked:
                with pytest.raises(EngineStopped, match=f"^{STOPPED}$"):
                    await question
            with pytest.raises(EngineStopped, match=f"^{STOPPED}$"):
                async for _ in outputs:
                    pass
            assert await asyncio.to_thread(failed.wait, 60)
            with pytest.raises(EngineGone, match=f"^{STOPPED}$"):
                await collect(engine, make_sequence("b", make_prompt(5)))

    run_async(test)
    assert "a panic in an extension" in caplog.text


def test_closing_ends_what_is_open(gate: GateDrafter) -> None:
    """``close`` ends open requests with ``EngineStopped`` and the thread; closing again is
    harmless, and so is closing an engine that was never started."""

    async def test() -> None:
        async with started(lambda: make(gate)) as engine:
            outputs = engine.generate(make_sequence("a", make_prompt(5), **LONG))
            await anext(outputs)
            gate.gate.clear()
            assert await asyncio.to_thread(gate.is_waiting.wait, 60)
            closing = asyncio.create_task(asyncio.to_thread(engine.close))
            await eventually(lambda: not engine._inbox.empty())
            gate.gate.set()
            with pytest.raises(EngineStopped, match="closed"):
                async for _ in outputs:
                    pass
            await closing
            assert engine.num_open == 0
            with pytest.raises(EngineStopped, match="closed"):
                await collect(engine, make_sequence("b", make_prompt(5)))
        await asyncio.to_thread(engine.close)
        AsyncEngine(make, 1).close()

    run_async(test)
    assert not any(thread.name == "hdserve-engine" for thread in threading.enumerate())


def test_an_engine_that_cannot_be_built() -> None:
    """``start`` raises what building the engine raised."""

    def fail() -> Engine:
        raise ConfigError("no such engine")

    engine = AsyncEngine(fail, 1)
    with pytest.raises(ConfigError, match="no such engine"):
        engine.start()
    with pytest.raises(EngineStopped):
        engine.check(1000)
    engine.close()


def test_a_step_that_hangs_is_noticed(gate: GateDrafter) -> None:
    """``check`` raises when a step takes too long, and not when there is nothing to do, when a
    request just came after a long silence, or when a client does not read its outputs."""

    async def test() -> None:
        async with started(lambda: make(gate)) as engine:
            await asyncio.sleep(0.05)
            engine.check(max_silence_s=0.0)
            outputs = engine.generate(make_sequence("a", make_prompt(5)))
            await anext(outputs)
            stalled = await engine.ask(lambda inner: inner)
            await eventually(lambda: not stalled.has_work)
            await eventually(lambda: is_quiet(engine))
            assert engine.num_open == 1
            engine.check(max_silence_s=0.0)
            await outputs.aclose()
            gate.gate.clear()
            hanging = engine.generate(make_sequence("b", make_prompt(5)))
            task = asyncio.create_task(anext(hanging))
            await asyncio.to_thread(gate.is_waiting.wait)
            engine.check(max_silence_s=1000)
            time.sleep(0.02)
            with pytest.raises(EngineStopped, match="has not finished a step"):
                engine.check(max_silence_s=0.01)
            gate.gate.set()
            await task
            await hanging.aclose()

    run_async(test)


def is_quiet(engine: AsyncEngine) -> bool:
    try:
        engine.check(max_silence_s=0.0)
    except EngineStopped:
        return False
    return True


def test_an_event_loop_that_is_gone_harms_nobody() -> None:
    """Outputs for a loop that was closed are dropped; the engine serves the next one."""
    engine = AsyncEngine(make, 8)
    engine.start()

    async def leave() -> None:
        outputs = engine.generate(make_sequence("a", make_prompt(5), **LONG))
        await anext(outputs)
        abandoned.append(outputs)

    abandoned: list[Any] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()

    async def stay() -> None:
        assert (await collect(engine, make_sequence("b", make_prompt(5))))[-1].finish_reason

    asyncio.run(stay())
    engine.close()
    with pytest.raises(StopIteration):
        abandoned[0].aclose().send(None)

"""What other replicas generated is taken in between steps, and nothing after its flush."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest

from deployments.replica.inflow import MAX_WAITING_TOKENS, Inflow
from hdserve.config import DraftingConfig, ModelConfig
from hdserve.core import SamplingParams, Sequence
from hdserve.engine.async_engine import AsyncEngine
from hdserve.engine.engine import Engine
from hdserve.engine.host import ModelHost
from tests.waiting import WAIT_S, eventually

MODEL = "a-model"
OUTPUT_TOKENS = 1000


class Replica(NamedTuple):
    """An engine and what flows into its databases."""

    host: ModelHost
    engine: AsyncEngine
    inflow: Inflow

    def deliver(self, namespace: str, num_outputs: int, model: str = MODEL) -> None:
        outputs = [
            np.arange(number, number + OUTPUT_TOKENS, dtype=np.uint32)
            for number in range(num_outputs)
        ]
        self.inflow.deliver(model, namespace, outputs)

    def num_outputs(self, namespace: str) -> int:
        """In the database of the engine."""
        partition = self.host.own_database.peek(namespace)
        return 0 if partition is None else partition.num_texts

    def num_learned_tokens(self, engine: Engine, namespace: str) -> int:
        return engine.drafters._drafters[0].calibration(namespace).num_tokens  # type: ignore[attr-defined]

    @contextmanager
    def between_two_steps(self) -> Iterator[None]:
        """The engine takes nothing in meanwhile."""
        is_over = threading.Event()
        self.engine.call(lambda _: bool(is_over.wait(WAIT_S)))
        yield
        is_over.set()


@pytest.fixture(scope="module")
def hosted() -> Iterator[tuple[ModelHost, AsyncEngine]]:
    drafting = DraftingConfig(adapts_budget=False)
    host = ModelHost(ModelConfig(name=MODEL, model="hdserve-tiny", drafting=drafting))
    engine = AsyncEngine(host.make_engine, 8)
    engine.start()
    yield host, engine
    engine.close()


@pytest.fixture
def replica(hosted: tuple[ModelHost, AsyncEngine]) -> Iterator[Replica]:
    host, engine = hosted
    inflow = Inflow(host, engine)
    yield Replica(host, engine, inflow)
    eventually(lambda: not inflow.num_waiting_tokens)
    done = threading.Event()
    engine.call(lambda _: [host.forget(_, MODEL, name) for name in "nm"] and done.set())
    assert done.wait(WAIT_S)


def test_a_flush_overtakes_all_that_waits(replica: Replica) -> None:
    """It is carried out before the next step, however much was delivered before it."""
    replica.deliver("n", 1)
    eventually(lambda: replica.num_outputs("n") == 1)

    async def flush() -> int:
        with replica.between_two_steps():
            for _ in range(10):
                replica.deliver("m", 3)
                replica.deliver("n", 3)
            replica.inflow.forget(MODEL, "n")
            asked = asyncio.create_task(replica.engine.ask(lambda _: replica.num_outputs("n")))
            await asyncio.sleep(0)
        return await asked

    assert asyncio.run(flush()) == 0
    eventually(lambda: replica.num_outputs("m") == 30)
    assert replica.num_outputs("n") == 0
    assert replica.inflow.num_skipped_outputs == 0


def test_only_what_was_delivered_after_a_flush_is_used(replica: Replica) -> None:
    with replica.between_two_steps():
        replica.deliver("n", 5)
        replica.inflow.forget(MODEL, "n")
        replica.deliver("n", 2)
    eventually(lambda: not replica.inflow.num_waiting_tokens)
    eventually(lambda: replica.num_outputs("n") == 2)


def test_the_oldest_is_skipped_where_too_much_waits(replica: Replica) -> None:
    """Not more than a bound ever waits, and what is skipped is counted."""
    num_outputs = 2 * MAX_WAITING_TOKENS // OUTPUT_TOKENS
    with replica.between_two_steps():
        replica.deliver("n", num_outputs)
        num_skipped = replica.inflow.num_skipped_outputs
        num_waiting = replica.inflow.num_waiting_tokens
        assert replica.inflow.is_behind()
    assert 0.9 * MAX_WAITING_TOKENS < num_waiting <= MAX_WAITING_TOKENS
    assert num_skipped == num_outputs - num_waiting // OUTPUT_TOKENS
    eventually(lambda: not replica.inflow.num_waiting_tokens)
    eventually(lambda: replica.num_outputs("n") == num_outputs - num_skipped)
    assert not replica.inflow.is_behind()
    partition = replica.host.own_database.peek("n")
    assert partition is not None
    newest = num_outputs - 1 + OUTPUT_TOKENS - 1
    assert int(partition.log.max()) == newest


def test_an_output_that_is_longer_than_all_that_may_wait_is_taken_in(replica: Replica) -> None:
    output = np.arange(MAX_WAITING_TOKENS + 1, dtype=np.uint32)
    replica.inflow.deliver(MODEL, "n", [output])
    eventually(lambda: replica.num_outputs("n") == 1)


def test_what_cannot_be_taken_in_keeps_nothing_else_back(replica: Replica) -> None:
    with replica.between_two_steps():
        replica.deliver("n", 1, model="unknown")
        replica.inflow.forget("unknown", "m")
        replica.inflow.forget(MODEL, "m")
        replica.deliver("n", 1)
    eventually(lambda: replica.num_outputs("n") == 1)


def learned(replica: Replica) -> bytes:
    """What drafting learned from a request, in a namespace of its own."""

    async def generate() -> bytes | None:
        params = SamplingParams(max_tokens=1100, ignore_eos=True, seed=1)
        seq = Sequence("1", [5, 6, 7], params, namespace="learned")
        async for _ in replica.engine.generate(seq):
            pass
        return await replica.engine.ask(lambda engine: engine.drafters.states("learned"))

    states = asyncio.run(generate())
    assert states is not None
    return states


def test_what_was_learned_elsewhere_overtakes_text_but_no_flush(replica: Replica) -> None:
    states = learned(replica)
    found: list[tuple[int, int, int]] = []

    def look(engine: Engine) -> None:
        num_learned = [replica.num_learned_tokens(engine, name) for name in "nm"]
        found.append((*num_learned, replica.inflow.num_waiting_tokens))

    with replica.between_two_steps():
        replica.deliver("other", 50)
        for name in "nm":
            replica.inflow.deliver_calibration(MODEL, name, states)
        replica.inflow.forget(MODEL, "m")
        replica.engine.call(look)
    eventually(lambda: bool(found))
    ((num_kept, num_flushed, num_waiting),) = found
    assert num_kept > 0
    assert num_flushed == 0
    assert num_waiting > 0

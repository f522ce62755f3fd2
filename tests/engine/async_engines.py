"""Engines in threads of their own, and what waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from hdserve import core
from hdserve.core import StepOutput
from hdserve.drafting.base import Drafter
from hdserve.engine.async_engine import AsyncEngine
from hdserve.engine.engine import Engine
from hdserve.tree import DraftTree
from tests.engine.helpers import GREEDY
from tests.engines import make_engine

LONG: dict[str, Any] = {**GREEDY, "max_tokens": 240}


class GateDrafter(Drafter):
    """Drafts nothing; a step waits while the gate is closed, and fails as told."""

    name = "gate"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = threading.Event()
        self.num_skipped_tokens = 0
        self.panic: BaseException | None = None

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        if not self.gate.is_set():
            self.is_waiting.set()
        self.gate.wait(60)
        if self.panic is not None:
            raise self.panic
        seq.num_cached_tokens += self.num_skipped_tokens  # breaks an invariant of the engine


def make(drafter: Drafter | None = None, **options: Any) -> Engine:
    """An engine with this drafter alone, or with none."""
    return make_engine([] if drafter is None else [drafter], **options)


@asynccontextmanager
async def started(
    make_it: Callable[[], Engine] = make,
    max_num_open: int = 8,
    on_failure: Callable[[], None] | None = None,
) -> AsyncIterator[AsyncEngine]:
    """An engine that runs until the block ends."""
    engine = AsyncEngine(make_it, max_num_open, on_failure)
    await asyncio.to_thread(engine.start)
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.close)


async def collect(engine: AsyncEngine, seq: core.Sequence) -> list[StepOutput]:
    """All outputs of a request."""
    return [output async for output in engine.generate(seq)]


async def eventually(condition: Callable[[], Any]) -> None:
    """Wait until ``condition`` holds; the test's own timeout ends what never does."""
    while not condition():
        await asyncio.sleep(0.005)


def run_async(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test to its end."""
    asyncio.run(test())  # type: ignore[arg-type]

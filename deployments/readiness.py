"""Whether models answer, without asking their replicas as often as somebody wants to know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from deployments.generation import ModelInfo
from hdserve.errors import HdserveError

TIMEOUT_S = 2.0
KEEP_S = 1.0


class Readiness:
    """Asks a replica of a model once for all who want to know; used from one event loop.

    Anybody may ask, without a key, and each question takes one of the replica's slots.  So there is
    one at a time, and its answer is everybody's for ``keep_s``.

    Args:
        describe: asks a replica of the model of a name.
        timeout_s: how long it may take.
    """

    def __init__(
        self,
        describe: Callable[[str], Awaitable[ModelInfo]],
        timeout_s: float = TIMEOUT_S,
        keep_s: float = KEEP_S,
    ) -> None:
        self._describe = describe
        self._timeout_s = timeout_s
        self._keep_s = keep_s
        self._questions: dict[str, asyncio.Task[bool]] = {}

    async def is_ready(self, name: str) -> bool:
        """Return whether a replica of the model has answered in time."""
        if name not in self._questions:
            self._questions[name] = asyncio.create_task(self._ask(name))
        return await asyncio.shield(self._questions[name])

    async def _ask(self, name: str) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._describe(name)
        except (HdserveError, TimeoutError):
            return False
        finally:
            asyncio.get_running_loop().call_later(self._keep_s, self._questions.pop, name)
        return True

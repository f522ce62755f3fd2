"""What the models are, and whether they answer, without asking their replicas each time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextvars import Context

from deployments.generation import ModelInfo
from hdserve.errors import HdserveError

MAX_WAIT_S = 0.25
TIMEOUT_S = 2.0
KEEP_S = 1.0


class ModelInfos:
    """Remembers the last description of each model; used from one event loop.

    A replica may have room for less than the one it replaces, so everything that needs a replica's
    description asks here.  Anybody may ask whether models answer, without a key, and each question
    occupies one of the replica's slots.  So there is one question at a time, and its answer is
    shared for ``keep_s``.

    Args:
        describe: asks a replica of the named model.
        max_wait_s: how long the list of models waits for one.
        timeout_s: how long to wait for a model when asked whether it answers.
    """

    def __init__(
        self,
        describe: Callable[[str], Awaitable[ModelInfo]],
        max_wait_s: float = MAX_WAIT_S,
        timeout_s: float = TIMEOUT_S,
        keep_s: float = KEEP_S,
    ) -> None:
        self._describe = describe
        self._max_wait_s = max_wait_s
        self._timeout_s = timeout_s
        self._keep_s = keep_s
        self._known: dict[str, ModelInfo] = {}
        self._questions: dict[str, asyncio.Task[bool]] = {}

    async def describe(self, name: str) -> ModelInfo:
        """Return a replica's description of the model.

        Raises:
            HdserveError: none has answered.
        """
        info = await self._describe(name)
        self.learn(info)
        return info

    def known(self, name: str) -> ModelInfo | None:
        """Return the last description of the model."""
        return self._known.get(name)

    def learn(self, info: ModelInfo) -> None:
        """Remember a replica's description."""
        self._known[info.name] = info

    async def is_ready(self, name: str) -> bool:
        """Return whether a replica of the model has answered in time."""
        question = self._question(name)
        await asyncio.wait([question], timeout=self._timeout_s)
        return question.done() and question.result()

    async def context_lengths(
        self, models: Iterable[str], unasked: Collection[str] = ()
    ) -> dict[str, int]:
        """Return the context lengths, in tokens, of the models that are known, or soon known.

        Args:
            unasked: models that are not asked, because that would start a replica.
        """
        names = tuple(models)
        asked = [name for name in names if name not in self._known and name not in unasked]
        if asked:
            await asyncio.wait(map(self._question, asked), timeout=self._max_wait_s)
        return {name: self._known[name].max_model_len for name in names if name in self._known}

    def _question(self, name: str) -> asyncio.Task[bool]:
        """Return the question that is open, or was just answered.  It is not part of a request's
        context: Ray Serve cancels the calls of a request whose client is gone."""
        if name not in self._questions:
            question = asyncio.create_task(self._ask(name), context=Context())
            self._questions[name] = question
        return self._questions[name]

    async def _ask(self, name: str) -> bool:
        try:
            await self.describe(name)
        except HdserveError:
            return False
        finally:
            asyncio.get_running_loop().call_later(self._keep_s, self._questions.pop, name)
        return True

"""What the models are, without asking their replicas each time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable

from deployments.generation import ModelInfo
from hdserve.errors import HdserveError

MAX_WAIT_S = 0.25


class ModelInfos:
    """Remembers what a replica of each model said last; used from one event loop.

    A replica may have room for less than the one it replaces, so whatever asks a replica to
    describe itself asks here.  A model that does not answer is waited for a moment, and the
    question stays open: there is one at a time, however often the list of models is asked for.

    Args:
        describe: asks a replica of the model of a name.
    """

    def __init__(
        self, describe: Callable[[str], Awaitable[ModelInfo]], max_wait_s: float = MAX_WAIT_S
    ) -> None:
        self._describe = describe
        self._max_wait_s = max_wait_s
        self._known: dict[str, ModelInfo] = {}
        self._questions: dict[str, asyncio.Task[None]] = {}

    async def describe(self, name: str) -> ModelInfo:
        """Return what a replica of the model says of itself.

        Raises:
            HdserveError: none has answered.
        """
        info = await self._describe(name)
        self.learn(info)
        return info

    def known(self, name: str) -> ModelInfo | None:
        """Return what a replica of the model said last."""
        return self._known.get(name)

    def learn(self, info: ModelInfo) -> None:
        """Remember what a replica has said."""
        self._known[info.name] = info

    async def context_lengths(
        self, models: Iterable[str], unasked: Collection[str] = ()
    ) -> dict[str, int]:
        """Return the lengths, in tokens, of the contexts of those that are known or known soon.

        Args:
            unasked: models that are not asked, because that would start a replica.
        """
        names = tuple(models)
        for name in names:
            if name not in self._known and name not in self._questions and name not in unasked:
                self._questions[name] = asyncio.create_task(self._ask(name))
        open_questions = [self._questions[name] for name in names if name in self._questions]
        if open_questions:
            await asyncio.wait(open_questions, timeout=self._max_wait_s)
        return {name: self._known[name].max_model_len for name in names if name in self._known}

    async def _ask(self, name: str) -> None:
        try:
            await self.describe(name)
        except HdserveError:
            return  # asked again with the next list
        finally:
            del self._questions[name]

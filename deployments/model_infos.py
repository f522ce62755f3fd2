"""What the models are, and whether they answer, without asking their replicas each time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextvars import Context
from dataclasses import replace

from deployments.deadline import Deadline
from deployments.generation import ModelInfo
from deployments.model_servers import ModelServers
from hdserve.config import ModelConfig
from hdserve.errors import EngineStopped, HdserveError

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
        servers: of the models.
        check_open: raises an error if no more questions are wanted.
        describe_timeout_s: how long a replica may take to describe itself.
        max_wait_s: how long the list of models waits for one.
        timeout_s: how long to wait for a model when asked whether it answers.
    """

    def __init__(
        self,
        servers: ModelServers,
        check_open: Callable[[], None],
        describe_timeout_s: float,
        max_wait_s: float = MAX_WAIT_S,
        timeout_s: float = TIMEOUT_S,
        keep_s: float = KEEP_S,
    ) -> None:
        self._servers = servers
        self._check_open = check_open
        self._describe_timeout_s = describe_timeout_s
        self._max_wait_s = max_wait_s
        self._timeout_s = timeout_s
        self._keep_s = keep_s
        self._known: dict[str, ModelInfo] = {}
        self._questions: dict[str, asyncio.Task[bool]] = {}

    async def ask(self, model: ModelConfig) -> ModelInfo:
        """Return a replica's current description of the model.

        Raises:
            EngineStopped: none answered within ``describe_timeout_s``.
        """
        self._check_open()
        try:
            async with asyncio.timeout(self._describe_timeout_s):
                return await self._described(model)
        except TimeoutError as error:
            reason = f"no replica of the model has answered in {self._describe_timeout_s:g} s"
            raise EngineStopped(f"{reason}; try again") from error

    async def now(self, model: ModelConfig) -> ModelInfo | None:
        """Return a replica's current description of the model.  If the model may have no replica,
        and has none, return the last description, if any, without starting a replica.

        Raises:
            EngineStopped: a replica that exists, or always should, has not answered.
        """
        if not model.may_sleep:
            return await self.ask(model)
        answers: list[ModelInfo] = await self._servers.call_all(
            model.name, self._describe_timeout_s, "describe", may_have_none=True
        )
        for info in answers:
            self.learn(info)
        known = self._known.get(model.name)
        return known if answers or known is None else replace(known, num_running=0, num_waiting=0)

    async def without_waking(self, model: ModelConfig) -> ModelInfo:
        """Return a current description of the model; the last one if it may have no replica, and
        has none.

        Raises:
            EngineStopped: there is none yet, or a replica that exists has not answered.
        """
        found = await self.now(model)
        if found is None:
            raise EngineStopped("no replica of the model has answered yet; a request starts one")
        return found

    async def within(self, model: ModelConfig, deadline: Deadline) -> ModelInfo:
        """Return the last description of the model, or wait for one as long as the request may
        take: the model may have no replica yet."""
        known = self._known.get(model.name)
        if known is not None:
            return known
        return await deadline.wait(self._described(model))

    def renew(self, model: ModelConfig) -> None:
        """Ask a model that has been described what it is now; who calls this does not wait for it.
        To be called when a replica has begun to answer: it may run another revision than the one
        that the description is of, and asking it starts none."""
        if model.name in self._known:
            self._question(model)

    def learn(self, info: ModelInfo) -> None:
        """Remember a replica's description."""
        self._known[info.name] = info

    async def is_ready(self, model: ModelConfig) -> bool:
        """Return whether a replica of the model has answered in time."""
        question = self._question(model)
        await asyncio.wait([question], timeout=self._timeout_s)
        return question.done() and question.result()

    async def context_lengths(self, models: Collection[ModelConfig]) -> dict[str, int]:
        """Return the context lengths, in tokens, of the models that are known, or soon known, by
        their names.  Those that may have no replica are not asked: that would start one."""
        asked = [each for each in models if each.name not in self._known and not each.may_sleep]
        if asked:
            await asyncio.wait(map(self._question, asked), timeout=self._max_wait_s)
        names = [each.name for each in models if each.name in self._known]
        return {name: self._known[name].max_model_len for name in names}

    async def _described(self, model: ModelConfig) -> ModelInfo:
        info: ModelInfo = await self._servers.call(model.name, "describe")
        self.learn(info)
        return info

    def _question(self, model: ModelConfig) -> asyncio.Task[bool]:
        """Return the question that is open, or was just answered.  It is not part of a request's
        context: Ray Serve cancels the calls of a request whose client is gone."""
        name = model.name
        if name not in self._questions:
            question = asyncio.create_task(self._answers(model), context=Context())
            self._questions[name] = question
        return self._questions[name]

    async def _answers(self, model: ModelConfig) -> bool:
        try:
            await self.ask(model)
        except HdserveError:
            return False
        finally:
            asyncio.get_running_loop().call_later(self._keep_s, self._questions.pop, model.name)
        return True

"""What a replica has heard from the cluster's model database and not yet taken in."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hdserve.engine.async_engine import AsyncEngine
    from hdserve.engine.engine import Engine
    from hdserve.engine.host import ModelHost

T = TypeVar("T")

Outputs = list[npt.NDArray[np.uint32]]

MAX_WAITING_TOKENS = 2**17
"""Of more delivered tokens than this the oldest are skipped.  An engine without requests takes them
in within a fraction of a second, one with steps of a second within half a minute."""

BEHIND_TOKENS = MAX_WAITING_TOKENS // 4
"""Whoever has more text to deliver waits while this many tokens do: a reply of the actor, 96 KiB,
holds less than half of ``MAX_WAITING_TOKENS``."""

_TOKENS_AT_ONCE = 2048
"""How many delivered tokens are added between two steps of the engine: a few milliseconds of
work."""


class _Part(NamedTuple):
    model: str
    namespace: str
    outputs: Outputs

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))


class Inflow:
    """The way of news from the mirrors' threads to the engine's, which owns the local databases.

    The engine takes it in between its steps, as far as it has time.  A flush overtakes all that
    waits, and removes what it is about: nothing delivered before it is used after it.

    Thread-safe; nothing here blocks a thread for long.

    Attributes:
        num_waiting_tokens: delivered and not yet added to a database.
        num_skipped_outputs: never added, because newer ones came faster than they could be.
    """

    def __init__(self, host: ModelHost, engine: AsyncEngine) -> None:
        self.num_waiting_tokens = 0
        self.num_skipped_outputs = 0
        self._host = host
        self._engine = engine
        self._lock = threading.Lock()
        self._parts: deque[_Part] = deque()
        self._calibrations: dict[str, bytes] = {}
        self._flushed: deque[tuple[str, str]] = deque()
        self._is_scheduled = False

    def deliver(self, model: str, namespace: str, outputs: Outputs) -> None:
        """Add ``outputs``, which ``model`` generated on other replicas."""
        with self._lock:
            for part in _parts(outputs):
                self._put(_Part(model, namespace, part))
            self._schedule()

    def is_behind(self) -> bool:
        """Whether so much waits that no more should be delivered at once."""
        return self.num_waiting_tokens > BEHIND_TOKENS

    def deliver_calibration(self, model: str, namespace: str, calibration: bytes) -> None:
        """Adopt what all replicas together have learned about drafting, if it is still the newest
        when there is time."""
        if model != self._host.config.name:
            return
        with self._lock:
            is_scheduled = namespace in self._calibrations
            self._calibrations[namespace] = calibration
        if not is_scheduled:
            self._engine.call(partial(self._adopt, namespace))

    def forget(self, model: str, namespace: str) -> None:
        """Forget the namespace, which an operator flushed, before the engine's next step."""
        with self._lock:
            parts, self._parts = self._parts, deque()
            self._parts.extend(part for part in parts if part[:2] != (model, namespace))
            self.num_waiting_tokens = sum(part.num_tokens for part in self._parts)
            if model == self._host.config.name:
                self._calibrations.pop(namespace, None)
            self._flushed.append((model, namespace))
        self._engine.call_soon(self._forget_flushed)

    def _put(self, part: _Part) -> None:
        """Have ``part`` wait, instead of older ones if they are too many."""
        self._parts.append(part)
        self.num_waiting_tokens += part.num_tokens
        while self.num_waiting_tokens > MAX_WAITING_TOKENS and len(self._parts) > 1:
            self.num_skipped_outputs += len(self._pop().outputs)

    def _pop(self) -> _Part:
        part = self._parts.popleft()
        self.num_waiting_tokens -= part.num_tokens
        return part

    def _schedule(self) -> None:
        """Have the engine take in one part, if there is one; it never has more than one such
        command, so other commands need not wait for all parts."""
        if self._parts and not self._is_scheduled:
            self._is_scheduled = True
            self._engine.call(self._take_in)

    def _take_in(self, engine: Engine) -> None:
        try:
            part = self._after_flushes(engine, lambda: self._pop() if self._parts else None)
            if part is not None:
                self._host.apply(*part)
        finally:
            with self._lock:
                self._is_scheduled = False
                self._schedule()

    def _adopt(self, namespace: str, engine: Engine) -> None:
        calibration = self._after_flushes(engine, lambda: self._calibrations.pop(namespace, None))
        if calibration is not None:
            engine.drafters.adopt(namespace, calibration)

    def _after_flushes(self, engine: Engine, take: Callable[[], T]) -> T:
        """Take something that waits; all flushes that came before it are carried out."""
        while True:
            self._forget_flushed(engine)
            with self._lock:
                if not self._flushed:
                    return take()

    def _forget_flushed(self, engine: Engine) -> None:
        while self._flushed:
            self._host.forget(engine, *self._flushed.popleft())


def _parts(outputs: Outputs) -> Iterator[Outputs]:
    """Yield ``outputs`` in order, at most ``_TOKENS_AT_ONCE`` together or a single one."""
    part: Outputs = []
    num_tokens = 0
    for output in outputs:
        if part and num_tokens + len(output) > _TOKENS_AT_ONCE:
            yield part
            part, num_tokens = [], 0
        part.append(output)
        num_tokens += len(output)
    if part:
        yield part

"""The engine in a thread of its own; its outputs go to the event loops of the requests."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from hdserve.core import Sequence, StepOutput
from hdserve.engine.engine import Engine
from hdserve.engine.faults import FAULTS_OF_ONE_REQUEST
from hdserve.engine.request_check import check_num_sequences
from hdserve.errors import EngineGone, EngineStopped, HdserveError, InvalidRequest, Overloaded

logger = logging.getLogger(__name__)

T = TypeVar("T")

_Command = Callable[[Engine], None]

_DISPENSABLE_S = 0.005
"""How long a step may wait for commands that decoding does not need; at least one is run."""


class _Fallible:
    """A command that may fail; decoding goes on."""

    def __init__(self, command: _Command) -> None:
        self._command = command

    def __call__(self, engine: Engine) -> None:
        try:
            self._command(engine)
        except Exception:
            logger.exception("a command to the engine failed; decoding goes on")


class _Dispensable(_Fallible):
    """A command that decoding does not need: it may wait for later steps, too."""


class _Waiter:
    """Where the outputs of ``seq`` go: a queue in the event loop that asked for them."""

    def __init__(self, seq: Sequence, loop: asyncio.AbstractEventLoop) -> None:
        self.seq = seq
        self._loop = loop
        self.outputs: asyncio.Queue[StepOutput | Exception] = asyncio.Queue()

    def deliver(self, item: StepOutput | Exception) -> None:
        """Put ``item`` into the queue, from any thread; this never blocks and never fails."""
        try:
            self._loop.call_soon_threadsafe(self.outputs.put_nowait, item)
        except RuntimeError:
            logger.debug("an output came after its event loop had closed")


class AsyncEngine:
    """Runs an :class:`Engine` in one thread, the only one that ever touches it.

    Everything from outside comes through one inbox, read between steps; commands that decoding
    does not need delay the next step only briefly.  Delivery never blocks the engine.  If a step
    fails as a whole, not for one sequence only, every waiter gets ``EngineStopped`` and every
    later call ``EngineGone``: each request ends exactly once.  The cause is in the log alone, as it
    may contain what one of the requests sent.

    Args:
        make_engine: builds the engine, in the engine's own thread.
        max_num_open: most sequences that may be open, running and waiting together.
        on_failure: called in the engine's thread after every waiter was told of a failure; not
            when the engine is closed.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        max_num_open: int,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._on_failure = on_failure
        self._max_num_open = max_num_open
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._waiters: dict[str, _Waiter] = {}
        self._asked: set[Future[Any]] = set()
        self._num_open = self._num_made_ready = 0
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._busy_since_s: float | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hdserve-engine", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until the engine is built.

        Raises:
            Exception: whatever building it raised.
        """
        self._thread.start()
        self._is_ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return self._num_open

    @contextmanager
    def room(self, num_prompts: int, num_choices: int) -> Iterator[None]:
        """Reserve places for ``num_choices`` sequences of each of ``num_prompts`` prompts while
        they are prepared; leave the context before they are decoded.

        Raises:
            Overloaded: too many sequences are open or being prepared.
            InvalidRequest: more than can ever be open at once.
        """
        check_num_sequences(num_prompts, num_choices, self._max_num_open)
        number = num_prompts * num_choices
        with self._lock:
            if self._num_open + self._num_made_ready + number > self._max_num_open:
                raise Overloaded
            self._num_made_ready += number
        try:
            yield
        finally:
            with self._lock:
                self._num_made_ready -= number

    def check(self, max_silence_s: float) -> None:
        """Raise ``EngineStopped`` if the engine has failed, was closed, or has something to do but
        has not finished a step within ``max_silence_s``."""
        if self._failure is not None:
            raise self._stopped()
        busy_since_s = self._busy_since_s
        silence_s = 0.0 if busy_since_s is None else time.monotonic() - busy_since_s
        if silence_s > max_silence_s:
            raise EngineStopped(f"the engine has not finished a step for {silence_s:.0f} s")

    def call(self, command: _Command) -> None:
        """Have ``command`` run in the engine's thread between two steps, in the order of the calls.

        For what decoding does not need: an exception is logged, and the engine goes on; many
        commands at once are spread over several steps.
        """
        self._inbox.put(_Dispensable(command))

    def call_soon(self, command: _Command) -> None:
        """Have ``command`` run in the engine's thread before the next step, however many commands
        from :meth:`call` are waiting for later ones; an exception is logged, and the engine goes
        on."""
        self._inbox.put(_Fallible(command))

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """The answer of ``question``, which runs in the engine's thread between two steps.

        Raises:
            EngineStopped: the engine fails or is closed before it answers.
        """
        asked: Future[T] = Future()

        def command(engine: Engine) -> None:
            if not asked.set_running_or_notify_cancel():
                return
            try:
                asked.set_result(question(engine))
            except Exception as error:
                asked.set_exception(error)

        with self._lock:
            if self._failure is not None:
                raise self._stopped()
            self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        self._inbox.put(command)
        return await asyncio.wrap_future(asked)

    async def generate(self, seq: Sequence) -> AsyncGenerator[StepOutput, None]:
        """Decode ``seq``; the last output carries the finish reason.

        Closing the iterator early aborts the sequence.

        Raises:
            Overloaded: too many sequences are open.
            InvalidRequest: the engine refuses the sequence, or its id is in use.
            EngineGone: it had failed or was closed before.
            EngineStopped: the engine fails or is closed.
            HdserveError: the sequence has an invalid value that no check caught; see the log.
        """
        waiter = self._open(seq)
        is_ended = False
        try:
            while True:
                item = await waiter.outputs.get()
                is_ended = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                yield item
                if is_ended:
                    return
        finally:
            self._close(seq.request_id, aborts=not is_ended)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the thread; sequences that are still open get ``EngineStopped``."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _open(self, seq: Sequence) -> _Waiter:
        waiter = _Waiter(seq, asyncio.get_running_loop())
        with self._lock:
            if self._failure is not None:
                raise EngineGone(self._stopped().message)
            if self._num_open >= self._max_num_open:
                raise Overloaded
            if seq.request_id in self._waiters:
                raise InvalidRequest(f"the request id {seq.request_id!r} is in use", "request_id")
            self._num_open += 1
            self._waiters[seq.request_id] = waiter
            self._inbox.put(lambda engine: self._add(engine, seq))
        return waiter

    def _close(self, request_id: str, *, aborts: bool) -> None:
        with self._lock:
            self._num_open -= 1
            self._waiters.pop(request_id, None)
            # While the lock is held: afterwards the id could belong to another sequence.
            if aborts:
                self._inbox.put(lambda engine: engine.abort(request_id))

    def _add(self, engine: Engine, seq: Sequence) -> None:
        try:
            engine.add(seq)
        except HdserveError as error:
            self._deliver(seq, error)
        except FAULTS_OF_ONE_REQUEST:
            logger.exception("request %s failed; other requests are not affected", seq.request_id)
            reason = "this request could not be started; the server's log says why"
            self._deliver(seq, HdserveError(reason))

    def _deliver(self, seq: Sequence, item: StepOutput | Exception) -> None:
        waiter = self._waiters.get(seq.request_id)
        if waiter is not None and waiter.seq is seq:
            waiter.deliver(item)

    def _run(self) -> None:
        try:
            engine = self._make_engine()
            self._is_ready.set()
            self._serve(engine)
            self._fail(EngineStopped("the engine was closed"))
        except BaseException as error:  # panics of extension modules are no Exception
            logger.exception("the engine stopped")
            self._fail(error)
            if self._is_ready.is_set() and self._on_failure is not None:
                self._on_failure()
        finally:
            self._is_ready.set()

    def _serve(self, engine: Engine) -> None:
        postponed: deque[_Dispensable] = deque()
        while self._run_commands(engine, postponed):
            for output in engine.step():
                self._deliver(output.sequence, output)

    def _run_commands(self, engine: Engine, postponed: deque[_Dispensable]) -> bool:
        """Run the commands that have arrived, or wait for one while there is nothing to do; of
        those that decoding does not need, as many as there is time for.

        Returns:
            Whether to go on; ``False`` if the engine was asked to stop.
        """
        is_idle = not (engine.has_work or postponed)
        started_s = time.monotonic()
        self._busy_since_s = None if is_idle else started_s
        until_s = started_s + _DISPENSABLE_S
        while postponed:
            postponed.popleft()(engine)
            if time.monotonic() >= until_s:
                break
        with suppress(queue.Empty):
            while True:
                command = self._inbox.get(block=is_idle)
                if command is None:
                    return False
                if is_idle:
                    self._busy_since_s = time.monotonic()
                    until_s = self._busy_since_s + _DISPENSABLE_S
                    is_idle = False
                is_late = time.monotonic() >= until_s
                if isinstance(command, _Dispensable) and (postponed or is_late):
                    postponed.append(command)
                else:
                    command(engine)
        return True

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = error
            waiters, asked = [*self._waiters.values()], [*self._asked]
        for waiter in waiters:
            waiter.deliver(self._stopped())
        for question in asked:
            # The question during which the engine failed is already running.
            if question.running() or question.set_running_or_notify_cancel():
                question.set_exception(self._stopped())

    def _stopped(self) -> EngineStopped:
        if isinstance(self._failure, EngineStopped):
            return self._failure
        return EngineStopped("the engine has failed; the server's log says why")

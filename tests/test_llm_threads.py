"""A model in this process that several threads use, or whose use is interrupted."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import hdserve.llm as llm_module
from hdserve import LLM, SamplingParams, SpeculationParams
from hdserve.engine.structured_output.grammar import Grammars, GrammarState
from hdserve.errors import HdserveError
from hdserve.grammar import choice
from tests.interruption import traced
from tests.llms import OPTIONS, with_threads
from tests.waiting import eventually


@pytest.fixture(scope="module")
def llm() -> LLM:
    """One whose answers do not depend on what was asked before."""
    return LLM("hdserve-mini", **OPTIONS)


def test_after_an_interruption_answers_are_what_they_were() -> None:
    """Ctrl-C within a step: a stream that was open ends with the reason, and later answers, also to
    what begins like the one that was interrupted, are those of a new model."""
    llm = LLM("hdserve-mini", **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    prompt = [5, 300, 41, 7] * 10
    (wanted,) = llm.generate([prompt], params)
    stream = llm.stream([9, 8], params)
    next(stream)
    with _in_next_step(_interrupt), pytest.raises(KeyboardInterrupt):
        llm.generate([prompt], params)
    *_, last = stream
    assert (last.finish_reason, type(last.error)) == ("error", HdserveError)
    (again,) = llm.generate([prompt], params)
    assert again.token_ids == wanted.token_ids
    half = len(wanted.token_ids) // 2
    (rest,) = llm.generate([[*prompt, *wanted.token_ids[:half]]], params)
    assert rest.token_ids[: len(wanted.token_ids) - half] == wanted.token_ids[half:]


def test_an_interruption_while_outputs_are_delivered_loses_none(llm: LLM) -> None:
    """Ctrl-C at any line between a step and who asked for its outputs, those of a stream that
    another call's steps go on with among them: it has each token once."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    short = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    plain = SpeculationParams(is_enabled=False)
    (wanted,) = llm.generate([[5, 300, 41, 7]], params)
    for number in count():
        stream = llm.stream([5, 300, 41, 7], params, plain)
        outputs = [next(stream)]
        with _interrupted_in_delivery(number) as was_interrupted, suppress(KeyboardInterrupt):
            llm.generate([[9, 8]], short, plain)
        outputs += stream
        found = [token for output in outputs for token in output.token_ids]
        assert (number, found) == (number, wanted.token_ids)
        assert outputs[-1].finish_reason == "length"
        if not was_interrupted:
            break
    assert number > 20
    assert not llm._engine.has_work
    assert not llm._lock._is_owned()  # type: ignore[attr-defined]


def test_others_go_on_while_a_grammar_is_compiled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compiling takes up to seconds."""
    answers: list[Any] = []
    state_of = Grammars.state

    def state(self: Grammars, grammar: str) -> GrammarState:
        if not self.is_known(grammar):
            other = threading.Thread(
                target=lambda: answers.extend(llm.generate([[5, 6]])), daemon=True
            )
            other.start()
            other.join(timeout=60)
        return state_of(self, grammar)

    monkeypatch.setattr(Grammars, "state", state)
    llm.generate([[7]], SamplingParams(grammar=choice(["one of a kind"]), max_tokens=4))
    assert len(answers) == 1


def test_each_model_has_its_own_number_of_threads(llm: LLM) -> None:
    """Whichever was loaded last."""
    own = torch.get_num_threads()
    other = LLM("hdserve-mini", **with_threads(own + 1))
    numbers = []
    for each in (llm, other, llm):
        each.generate([[5]], SamplingParams(max_tokens=1))
        numbers.append(torch.get_num_threads())
    assert numbers == [own, own + 1, own]


def test_answers_of_several_threads_are_those_of_each_alone(llm: LLM) -> None:
    """Whoever needs a step runs it for all."""
    params = SamplingParams(temperature=0.0, max_tokens=24)
    prompts = [[5, 300, number] for number in range(6)]
    alone = [answer.token_ids for answer in llm.generate(prompts, params)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            answers = pool.map(lambda prompt: llm.generate([prompt], params), prompts)
            assert [answer.token_ids for (answer,) in answers] == alone


def test_a_thread_that_waits_for_its_answer_lets_others_have_theirs() -> None:
    """All places are taken by another thread's stream, which has each token as it comes."""
    llm = LLM("hdserve-mini", engine={**OPTIONS["engine"], "max_num_sequences": 1})
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    stream = llm.stream([5, 300], params, SpeculationParams(is_enabled=False))
    next(stream)
    thread = threading.Thread(target=llm.generate, args=([[9, 8]], params))
    steps, has_begun, has_output = count(), threading.Event(), threading.Event()
    had_output: list[bool] = []

    def other_waits() -> bool:
        if is_free := llm._turn.acquire(blocking=False):
            llm._turn.release()
        return not is_free

    def run(*_: Any) -> None:
        if threading.current_thread() is thread:
            number = next(steps)
            if number == 0:
                has_begun.set()
                eventually(other_waits)
            elif number == 1:
                had_output.append(has_output.wait(20))

    hook = llm._host.model.module.register_forward_pre_hook(run)
    try:
        thread.start()
        assert has_begun.wait(60)
        next(stream)
        has_output.set()
        assert len([*stream]) == 6
    finally:
        hook.remove()
        thread.join()
    assert had_output == [True]


def test_what_a_step_gave_a_call_is_taken_in_one_turn(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a thread whose steps give another one many outputs would be ahead of it."""
    in_use, num_turns = LLM._in_use, count()

    def counted(self: LLM) -> Any:
        next(num_turns)
        return in_use(self)

    monkeypatch.setattr(LLM, "_in_use", counted)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    llm.generate([[9, 8, number] for number in range(16)], params)
    num_to_begin = 2 * 16
    assert next(num_turns) - num_to_begin <= 2 * 10 + 4


def test_an_interruption_while_a_turn_is_taken_or_given_keeps_it_from_nobody(llm: LLM) -> None:
    """Ctrl-C as soon as it is taken, and before it is given."""

    class Interrupted:
        def __init__(self, when: str) -> None:
            self.when = when

        def acquire(self, blocking: bool = True) -> bool:
            found = turn.acquire(blocking)
            self._interrupt("acquire")
            return found

        def release(self) -> None:
            self._interrupt("release")
            turn.release()

        def _interrupt(self, when: str) -> None:
            if self.when == when:
                self.when = ""
                raise KeyboardInterrupt

    turn = llm._turn
    for when in ("acquire", "release"):
        llm._turn = Interrupted(when)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5]], SamplingParams(max_tokens=1))
        llm._turn = turn
        with ThreadPoolExecutor(1) as pool:
            (answer,) = pool.submit(llm.generate, [[5]], SamplingParams(max_tokens=1)).result(60)
        assert len(answer.token_ids) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists a process's threads")
def test_a_thread_whose_answers_are_there_leaves_no_threads_behind() -> None:
    """Those that shared its forwards would keep those of the next one from waiting for work."""
    llm = LLM("hdserve-mini", **with_threads(3))
    is_done = threading.Event()

    def threads() -> set[str]:
        return {*os.listdir("/proc/self/task")}

    def answer() -> None:
        llm.generate([[9, 8, number] for number in range(24)], SamplingParams(max_tokens=4))
        is_asked.set()
        is_done.wait()

    before, is_asked = threads(), threading.Event()
    thread = threading.Thread(target=answer)
    thread.start()
    try:
        assert is_asked.wait(60)
        eventually(lambda: len(threads() - before) == 1, timeout_s=15.0)
    finally:
        is_done.set()
        thread.join()


def collect_in_another_thread() -> None:
    """As in one that computes a part of the step, which waits for it."""
    thread = threading.Thread(target=gc.collect, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("collect", [gc.collect, collect_in_another_thread])
def test_a_stream_that_is_collected_within_a_step_harms_nobody(
    llm: LLM, collect: Callable[[], object]
) -> None:
    """Python may close an iterator that nobody holds any more at any time, in any thread."""
    params = SamplingParams(temperature=0.0, max_tokens=24)
    (wanted,) = llm.generate([[5, 300]], params)
    left: list[Any] = [llm.stream([9, 8], params)]
    next(left[0])
    left.append(left)  # not freed before it is collected
    del left
    with _in_next_step(collect):
        (found,) = llm.generate([[5, 300]], params)
    assert found.token_ids == wanted.token_ids
    (again,) = llm.generate([[5, 300]], params)
    assert again.token_ids == wanted.token_ids


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_what_leaves_leaves_however_often_it_is_interrupted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    """Ctrl-C while what was interrupted is cleared away: nobody goes on with what is left."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    (wanted,) = llm.generate([[5, 300]], params)
    abort, calls = llm._engine.abort, count()

    def interrupted(request_id: str) -> None:
        if next(calls) == num_done:
            raise KeyboardInterrupt
        abort(request_id)

    monkeypatch.setattr(llm._engine, "abort", interrupted)
    with _in_next_step(_interrupt), pytest.raises(KeyboardInterrupt):
        llm.generate([[9, number] for number in range(24)], params)
    (again,) = llm.generate([[5, 300]], params)
    assert again.token_ids == wanted.token_ids
    assert not llm._engine.has_work
    assert not llm._outputs


def test_a_stream_that_is_collected_while_another_leaves_harms_nobody(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    (wanted,) = llm.generate([[5, 300]], params)
    first, left = llm.stream([9, 8], params), [llm.stream([9, 8], params)]
    next(first), next(left[0])  # type: ignore[call-overload]
    left.append(left)  # type: ignore[arg-type]
    del left
    abort, open_calls = llm._engine.abort, []

    def collecting(request_id: str) -> None:
        open_calls.append(request_id)
        gc.collect()
        assert open_calls == [request_id]
        abort(request_id)
        open_calls.pop()

    monkeypatch.setattr(llm._engine, "abort", collecting)
    first.close()  # type: ignore[attr-defined]
    monkeypatch.undo()
    assert not llm._engine.has_work
    (again,) = llm.generate([[5, 300]], params)
    assert again.token_ids == wanted.token_ids


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextmanager
def _interrupted_in_delivery(number: int) -> Iterator[list[bool]]:
    """``KeyboardInterrupt`` instead of the line of this number of what follows steps; tells by a
    list with something in it whether there was one."""
    lines, found = count(), list[bool]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        is_delivery = code.co_filename == llm_module.__file__ or code.co_name == "hand_out"
        if not is_delivery or code.co_name in ("_drop", "_abort_dropped"):
            return None
        text = linecache.getline(code.co_filename, frame.f_lineno).lstrip()
        heeds_no_signal = text.startswith(("with ", "try:"))  # beside which a lock would stay
        if event == "line" and not heeds_no_signal and next(lines) == number:
            found.append(True)
            raise KeyboardInterrupt
        return trace

    with traced(trace):
        yield found


@contextmanager
def _in_next_step(act: Callable[[], object]) -> Iterator[None]:
    """``act`` is called once while the model runs."""

    def run(*_: Any) -> None:
        hook.remove()
        act()

    hook = register_module_forward_pre_hook(run)
    try:
        yield
    finally:
        hook.remove()

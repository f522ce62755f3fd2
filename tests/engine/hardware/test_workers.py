"""Work that is shared is done once, whoever does it, and its errors are not lost."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from hdserve.engine.hardware.workers import Workers, end_own_threads
from tests.waiting import eventually


@pytest.fixture(params=[True, False], ids=["openmp", "own threads"])
def workers(request: pytest.FixtureRequest) -> Workers:
    return three_workers(uses_openmp=request.param)


def three_workers(*, uses_openmp: bool) -> Workers:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    found = Workers(uses_openmp=uses_openmp)
    torch.set_num_threads(before)
    if uses_openmp and not found.uses_openmp:
        pytest.skip("this PyTorch does not use GNU OpenMP")
    return found


@pytest.mark.parametrize(("num_items", "num_parts"), [(10, 1), (10, 2), (10, 3), (2, 3), (0, 2)])
def test_every_item_is_done_once(workers: Workers, num_items: int, num_parts: int) -> None:
    done: list[int] = []
    parts: list[int] = []

    def work(part: int, first: int, stop: int) -> None:
        parts.append(part)
        done.extend(range(first, stop))

    for _ in range(20):
        workers.share(work, num_items, num_parts)
        assert sorted(done) == list(range(num_items))
        assert sorted(parts) == list(range(num_parts))
        done.clear()
        parts.clear()


def test_several_threads_take_part(workers: Workers) -> None:
    """Each part waits for the other, so one thread alone would not come to an end."""
    met = threading.Barrier(2, timeout=60)
    workers.share(lambda *_: met.wait(), 2, 2)


def test_errors_are_raised_and_the_next_work_is_done(workers: Workers) -> None:
    def fail(part: int, _first: int, _stop: int) -> None:
        raise ValueError(part)

    with pytest.raises(ValueError, match=r"[01]"):
        workers.share(fail, 2, 2)
    done: list[int] = []
    workers.share(lambda part, *_: done.append(part), 2, 2)
    assert sorted(done) == [0, 1]


def test_an_error_waits_for_the_others() -> None:
    """Nobody works on when the caller goes on, who may free what they write to."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    started, done = threading.Event(), []

    def work(part: int, _first: int, _stop: int) -> None:
        if threading.current_thread() is threading.main_thread():
            started.wait(60)
            raise KeyboardInterrupt
        started.set()
        threading.Event().wait(0.3)
        done.append(part)

    try:
        with pytest.raises(KeyboardInterrupt):
            Workers(uses_openmp=False).share(work, 2, 2)
        assert done
    finally:
        torch.set_num_threads(before)


def test_parts_are_not_too_small(workers: Workers) -> None:
    assert [workers.num_parts(size, 10) for size in (0, 19, 20, 39, 400)] == [1, 1, 2, 3, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists a process's threads")
def test_a_thread_ends_those_of_openmp_that_shared_its_work() -> None:
    """So that those of another are not too many for the cores; it gets others when it goes on."""
    workers = three_workers(uses_openmp=True)
    numbers: list[int] = []

    def threads() -> set[str]:
        return {*os.listdir("/proc/self/task")}

    def share_and_end() -> None:
        before = threads()
        workers.share(lambda *_: None, 3, 3)
        own = threads() - before
        numbers.append(len(own))
        end_own_threads()
        eventually(lambda: own.isdisjoint(threads()))

    def run() -> None:
        share_and_end()
        share_and_end()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert numbers == [2, 2]

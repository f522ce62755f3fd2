"""How hypothesis searches in all tests, with how many threads, which tests may run at the same
time, and what ends one that hangs."""

from __future__ import annotations

import faulthandler
import gc
import os
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from hdserve.config.loading import CONFIG_ENVIRONMENT_VARIABLE, access_variables

RAY = "ray"
GRACE_S = 30.0

torch.set_num_threads(1)

for name in ("RAY_ADDRESS", *access_variables(), CONFIG_ENVIRONMENT_VARIABLE):
    os.environ.pop(name, None)  # what the user serves elsewhere is left alone

settings.register_profile(
    "hdserve",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hdserve")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: modules and tests, which are there to the end, are looked at
    again and again for it; and not afterwards either."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Parallel runs: the tests of a file share their fixtures, and one process has all files in
    which a Ray cluster is started; they take longest, so it begins with them."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return RAY if starts_ray(config.rootpath / path) else path

        def _assign_work_unit(self, node: Any) -> None:
            if RAY in self.workqueue:
                self.workqueue.move_to_end(RAY, last=False)
            super()._assign_work_unit(node)

    return Scheduler(config, log)


@cache
def starts_ray(file: Path) -> bool:
    """Whether any test of a file starts a Ray cluster."""
    return "mark.ray" in file.read_text()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """The signal of a timeout ends nothing that waits in ``ray.get``, which drops its exception.
    After a while more the process ends, for which the test fails, and another one goes on."""
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(settings.timeout + GRACE_S, exit=True, file=stderr)
    return (yield)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Generator[None, object, object]:
    faulthandler.cancel_dump_traceback_later()
    return (yield)

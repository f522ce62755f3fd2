"""How hypothesis searches in all tests, with how many threads, and which tests may run at the same
time."""

from __future__ import annotations

import gc
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

RAY_TESTS = (
    *("tests/actors/", "tests/chaos/", "tests/deployments/"),
    *("tests/fuzz/test_openapi.py", "tests/test_serve_command.py"),
)

torch.set_num_threads(1)

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
    """Parallel runs: the tests of a file share their fixtures, and one process has all of those
    that start a Ray cluster."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "ray" if path.startswith(RAY_TESTS) else path

    return Scheduler(config, log)

"""How hypothesis searches in all tests, and which tests may run at the same time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "hdserve",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hdserve")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Parallel runs: one Ray cluster at a time, and the tests of a file share their fixtures."""
    for item in items:
        group = "ray" if item.get_closest_marker("ray") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))

"""What all tests share: fixtures, and how hypothesis searches."""

from collections.abc import Iterator

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


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One real Ray cluster for the whole session."""
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=100 * 2**20,
    )
    yield
    ray.shutdown()

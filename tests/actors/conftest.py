"""The cluster of this package's tests."""

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """One real Ray cluster; it ends with the package, as other tests start their own.

    A local ``ray.init`` turns token authentication on for the rest of the process, which
    clusters of later tests would inherit.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=100 * 2**20,
        )
        yield
        ray.shutdown()

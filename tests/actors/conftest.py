"""The cluster of this package's tests."""

from collections.abc import Iterator

import pytest

from tests.clusters import local_ray


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """One real Ray cluster; it ends with the package, as other tests start their own."""
    with local_ray():
        yield

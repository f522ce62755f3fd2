"""Which settings of a deployment an actor does not use."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from actors import settings
from actors.settings import warn_of_other_settings
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.snapshot import DatabaseKey

KEY = DatabaseKey("a-model", "f" * 32)


@pytest.mark.ray
@pytest.mark.parametrize("told", [{}, {"settings": None}, ValueError("no")])
def test_an_actor_that_does_not_say_what_it_uses_is_used(
    ray_cluster: None, caplog: pytest.LogCaptureFixture, told: Any
) -> None:
    """Nothing is shared through one that cannot be asked, and this is no more than a warning."""

    @ray.remote(num_cpus=0)
    class Told:
        def info(self) -> Any:
            if isinstance(told, Exception):
                raise told
            return told

    warn_of_other_settings(Told.remote(), KEY, ModelDatabaseConfig())
    (record,) = [record for record in caplog.records if record.name == settings.__name__]
    assert "a-model does not say which settings" in record.message

"""What a model's host lets its requests know of one another."""

from __future__ import annotations

import pytest

from hdserve.config import ModelConfig
from hdserve.engine.host import ModelHost
from tests.engines import make_sequence, run


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_model_that_does_not_share_keeps_nothing(is_shared: bool) -> None:
    """Not of answers that have ended, nor of those that run beside others, nor what the model
    thought likely in them."""
    config = {
        "name": "m",
        "model": "hdserve-mini",
        "share_output": is_shared,
        "engine": {"compile": False, "kv_cache_tokens": 1024},
        "drafting": {"adapts_budget": False},
    }
    host = ModelHost(ModelConfig.model_validate(config))
    engine = host.make_engine()
    run(engine, [make_sequence(name, [5, 300, 41, 7], temperature=0.0) for name in "ab"])
    database = host.own_database
    assert (database.num_tokens > 0) is is_shared
    assert (database.num_recycled_entries > 0) is is_shared

"""Only row counts that were seen to agree bit for bit are used, as many as the cache lets try."""

from __future__ import annotations

import logging

import pytest
import torch

from hdserve.config import EngineConfig
from hdserve.core import Source
from hdserve.engine.batch import Chunk
from hdserve.engine.exactness import choose_shapes, find_exact_shapes
from hdserve.engine.kv_cache import KVCache
from hdserve.engine.loader import prepare_model
from hdserve.engine.model_runner import ModelRunner
from hdserve.engine.shapes import exact_candidates
from hdserve.tree import DraftTree
from tests.models import make_model


def make_runner(num_rows: int, dtype: torch.dtype = torch.float32) -> ModelRunner:
    model = prepare_model(make_model(dtype=dtype), EngineConfig())
    return ModelRunner(model, KVCache(model.kv_shape, num_rows, model.dtype, model.device))


def logits_of(runner: ModelRunner, num_drafts: int) -> torch.Tensor:
    """The root's logits after a context of nine tokens, with drafts below it."""
    segment = runner.cache.allocate(64)
    assert segment is not None
    runner.forward([Chunk(segment, 0, list(range(1, 10)), None)])
    tree = DraftTree(7, num_drafts)
    tree.add_path(list(range(20, 20 + num_drafts)), Source.OTHER)
    (outputs,) = runner.forward([Chunk(segment, 9, [7], tree)])
    runner.cache.free(segment)
    assert outputs is not None
    return outputs.logits[0]


def test_drafts_change_no_bit_at_the_shapes_that_are_found() -> None:
    """Whatever this machine's kernels do, a token's logits do not depend on its drafts."""
    runner = make_runner(512)
    found = find_exact_shapes(runner, 64)
    assert runner.cache.usage == 0.0
    if found is None:
        pytest.skip("no two row counts agree on this machine")
    assert set(found.row_counts) <= set(exact_candidates(64).row_counts)
    runner.shapes = found
    plain = logits_of(runner, 0)
    assert all(torch.equal(logits_of(runner, number), plain) for number in (1, 5, 30))


def test_counts_that_do_not_fit_are_left_out() -> None:
    """A cache too small for the largest forward is no reason to give up on the others."""
    large, small = make_runner(1024), make_runner(160)
    everything, found = find_exact_shapes(large, 200), find_exact_shapes(small, 200)
    if everything is None:
        pytest.skip("no two row counts agree on this machine")
    assert found is not None
    assert set(found.row_counts) <= {count for count in everything.row_counts if count <= 96}


def test_a_cache_without_room_to_try_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing fits: forwards stay as they are, and the log does not blame the machine alone."""
    runner = make_runner(32)
    with caplog.at_level(logging.WARNING):
        assert choose_shapes(runner, 64, exact=True) is runner.shapes
    assert "that fit into the KV cache" in caplog.text

"""What makes CUDA graphs possible, as far as it shows without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hdserve.config import EngineConfig
from hdserve.engine.batch.step_context import running
from hdserve.engine.batch.step_plan import StepPlan
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.loading.loader import prepare_model
from tests.models import ARCHITECTURES, make_model

CHOOSING = {"gpt_oss"}
"""Those whose experts, as they are set here, are called by what was computed."""


class OneDevice(TorchDispatchMode):
    """Within it no operator takes or gives tensors of two devices."""

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        _types: object,
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        found = function(*arguments, **(options or {}))
        tensors = [
            leaf
            for leaf in tree_leaves((arguments, options, found))
            if isinstance(leaf, torch.Tensor)
        ]
        assert len({tensor.device for tensor in tensors}) <= 1, function
        return found


@torch.inference_mode()
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in CHOOSING])
def test_forwards_of_stock_modules_wait_for_nothing(architecture: str) -> None:
    """Their tensors are without data here, so that there is nothing to wait for; nor do they copy
    from another device, or to it, which no graph may."""
    device = torch.device("meta")
    module: Any = make_model(architecture, torch.bfloat16).to(device)
    loaded = prepare_model(module, EngineConfig())
    cache = KVCache(loaded.kv_shape, 64, loaded.dtype, device)
    cache.is_read_whole = True
    rows = torch.zeros(8, dtype=torch.int64, device=device)

    def attend(
        query: torch.Tensor, _keys: torch.Tensor, values: torch.Tensor, *_: object
    ) -> torch.Tensor:
        return query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])

    plan = StepPlan(cache, rows, Workers(), attend_all=attend)
    with running(plan), OneDevice():
        output = module(
            input_ids=rows[None], position_ids=rows[None], use_cache=False, logits_to_keep=rows
        )
    assert output.logits.shape == (1, 8, loaded.vocab_size)

"""What a model stores of each token, seen from what it passes to its attention function.

Its own cache does not tell: that may be compressed, as in models with latent attention
(DeepSeek-AI 2024, "DeepSeek-V2", 2.1), or be missing in layers that attend to another layer's keys.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from hdserve.engine.batch.step_context import running
from hdserve.engine.batch.step_plan import StepPlan
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kv_cache.shape import KVShape, LayerShape
from hdserve.errors import UnsupportedModel

OF_ITS_OWN = "does not go through the attention interface of transformers"


class _Recorder:
    """Takes the place of a cache, and records only the shapes."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def write(
        self, layer: int, _rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **_: Any
    ) -> None:
        self.layers[layer] = LayerShape(keys.shape[1], keys.shape[3], values.shape[3])


@torch.inference_mode()
def probe_kv_shape(module: torch.nn.Module, device: torch.device) -> KVShape:
    """Run one token through a model that uses our attention, here a stub that attends to nothing.

    Raises:
        UnsupportedModel: it cannot run so, or some of its layers do not call the function.
    """
    name, recorder = type(module).__name__, _Recorder()
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    plan = StepPlan(cast("Any", recorder), token[0], Workers())
    try:
        with running(plan):
            module(input_ids=token, position_ids=token, use_cache=False)
    except (LookupError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        if not getattr(module, "_supports_attention_backend", True):
            raise UnsupportedModel(f"{name}: its attention {OF_ITS_OWN}") from error
        raise UnsupportedModel(f"{name} cannot be run in packed forwards: {error!r}") from error
    layers = recorder.layers
    if not layers or set(layers) != set(range(len(layers))):
        raise UnsupportedModel(
            f"{name}: the attention of {'some' if layers else 'all'} of its layers {OF_ITS_OWN}"
        )
    return KVShape(tuple(layers[index] for index in range(len(layers))))

"""Linear layers as a GPU has them: what compiled code calls, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hdserve.config import EngineConfig
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.step_context import running
from hdserve.engine.forward.compiled import can_compile
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.forward.model_runner import ModelRunner, rounded
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.linear.gpu_skinny import GpuSkinnyLinear, use_gpu_skinny_linear
from hdserve.engine.loading.compilation import compile_model
from hdserve.engine.loading.loader import prepare_model
from hdserve.tree import DraftTree
from tests.models import make_model

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")

_NUM_LAYERS = 2


def make_loaded(architecture: str) -> LoadedModel:
    """A model whose linear layers are those of a GPU."""
    module = make_model(architecture, torch.float64)
    loaded = prepare_model(module, EngineConfig(compile=False))
    use_gpu_skinny_linear(module)
    return loaded


def num_layers(loaded: LoadedModel) -> int:
    return sum(isinstance(each, GpuSkinnyLinear) for each in loaded.module.modules())


class Recorder:
    """Multiplies, and remembers by how many layers at a time."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(
        self,
        rows: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        self.numbers.append(len(weights))
        return [F.linear(rows, *each) for each in zip(weights, biases, strict=True)]


def test_layers_give_what_they_gave() -> None:
    layer = torch.nn.Linear(5, 3)
    module = torch.nn.Sequential(layer)
    use_gpu_skinny_linear(module)
    rows = torch.randn(2, 5)
    assert isinstance(module[0], GpuSkinnyLinear)
    assert module[0].weight is layer.weight
    torch.testing.assert_close(module(rows), layer(rows), rtol=0, atol=0)


@pytest.mark.skipif(not can_compile(), reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("architecture", "is_repeating"),
    [
        ("llama", True),
        ("qwen2", False),
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("qwen2", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_code_multiplies_layers_of_the_same_input_together(
    architecture: str, is_repeating: bool
) -> None:
    """In each layer queries, keys and values, and both halves of the feed-forward layer."""
    loaded = make_loaded(architecture)
    compiled = compile_model(loaded, is_repeating=is_repeating, uses_native=False)
    cache = KVCache(loaded.kv_shape, 64, loaded.dtype, loaded.device)
    runner = ModelRunner(loaded, cache, attends_in_one_call=False)
    segment = cache.rows.allocate(8)
    assert segment is not None
    recorder = Recorder()
    for token_ids in ([5], [5, 6, 7]):
        chunk = Chunk(segment, 0, token_ids, DraftTree(token_ids[-1], 0))
        with torch.inference_mode(), torch.compiler.set_stance("fail_on_recompile"):
            batch = runner._batch([chunk])
            plan = replace(batch.plan, multiply_rows=recorder)
            with running(plan):
                found = rounded(compiled(batch._replace(plan=plan)))
            torch.testing.assert_close(found, runner._logits(batch))
        assert recorder.numbers == [3, 1, 2, 1] * _NUM_LAYERS + [1]
        assert sum(recorder.numbers) == num_layers(loaded)
        recorder.numbers.clear()

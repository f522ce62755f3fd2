"""Models of transformers whose weights are prepacked answer as they do by themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import OlmoConfig, OlmoForCausalLM

from hdserve.config import EngineConfig
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.forward.compiled import can_compile
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.linear import prepacked_layers
from hdserve.engine.linear.prepacked import PrepackedLinear
from hdserve.engine.linear.prepacked_embedding import PrepackedEmbedding
from hdserve.engine.loading.compilation import compile_model
from hdserve.engine.loading.loader import prepare_model
from hdserve.engine.loading.model_check import check_packed_forward
from hdserve.tree import DraftTree
from tests.engine.linear.test_prepacked import needs_kernel
from tests.models import ARCHITECTURES

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    needs_kernel,
]

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 8,
}


def make_model(architecture: str, *, is_tied: bool) -> Any:
    """A random model all of whose layers are large enough to be prepacked."""
    torch.manual_seed(0)
    sizes = {**_SIZES, "tie_word_embeddings": is_tied}
    if architecture == "olmo":
        config = OlmoConfig(**sizes, num_hidden_layers=2, pad_token_id=None, eos_token_id=None)
        model: Any = OlmoForCausalLM(config)
    else:
        model = ARCHITECTURES[architecture](**sizes)
    return model.eval().bfloat16().requires_grad_(False)


def make_runner(model: torch.nn.Module) -> ModelRunner:
    loaded = prepare_model(model, EngineConfig(exact=True))
    return ModelRunner(loaded, KVCache(loaded.kv_shape, 256, loaded.dtype, loaded.device))


@pytest.fixture(params=[1, 2])
def num_streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has weights prepacked into so many."""
    monkeypatch.setattr(prepacked_layers, "pick_num_streams", lambda _num_bytes: request.param)


@pytest.mark.usefixtures("num_streams")
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_neox", "stablelm", "olmo"]
)
@torch.inference_mode()
def test_a_model_answers_as_before(architecture: str, is_tied: bool) -> None:
    """That of OLMo has no parameters but those of its linear layers, so none that is not prepacked
    where they are tied; the embedding of Gemma 3 multiplies its rows."""
    model = make_model(architecture, is_tied=is_tied)
    before = copy.deepcopy(model)
    check_packed_forward(make_runner(model))
    assert any(isinstance(each, PrepackedLinear) for each in model.modules())
    is_shared = isinstance(model.get_input_embeddings(), PrepackedEmbedding)
    assert is_shared == is_tied
    token_ids = torch.arange(60)[None]
    before.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    found, wanted = (each(token_ids, use_cache=False).logits[0] for each in (model, before))
    difference = (found - wanted).norm() / wanted.norm()
    assert difference < 0.05


@pytest.mark.skipif(not can_compile(), reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("num_streams", "is_repeating"),
    [
        (1, True),
        (2, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
    indirect=["num_streams"],
)
@pytest.mark.usefixtures("num_streams")
@torch.inference_mode()
def test_compiled_it_is_the_same_whatever_is_in_the_forward(is_repeating: bool) -> None:
    runner = make_runner(make_model("llama", is_tied=True))
    token_ids = list(range(40))
    chunks = [
        Chunk(segment, 0, [*token_ids[number:], *token_ids[:number]], DraftTree(3, 0))
        for number in range(3)
        if (segment := runner.cache.rows.allocate(64)) is not None
    ]
    plain = runner.forward(chunks)
    runner.compile_with(compile_model(runner.model, is_repeating=is_repeating))
    together = runner.forward(chunks)
    for chunk, among, eager in zip(chunks, together, plain, strict=True):
        (alone,) = runner.forward([chunk])
        assert alone is not None
        assert among is not None
        assert eager is not None
        assert torch.equal(alone.logits, among.logits)
        torch.testing.assert_close(alone.logits, eager.logits, atol=5e-2, rtol=5e-2)

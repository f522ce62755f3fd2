"""Only row counts that were seen to agree bit for bit are used, as many as the cache lets try."""

from __future__ import annotations

import logging
import math
import random
from dataclasses import replace
from typing import Literal

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hdserve.config import EngineConfig, ModelConfig
from hdserve.core import Source
from hdserve.engine.attention.cpu_tree import UNLIMITED, CpuTreeAttention
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.shapes import exact_candidates
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.hardware.devices import has_amx_bf16
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.loading import exactness
from hdserve.engine.loading.exactness import choose_shapes, find_exact_shapes, has_experts
from hdserve.engine.loading.loader import load_model, prepare_model
from hdserve.errors import ConfigError
from hdserve.tree import DraftTree
from tests.engines import make_engine
from tests.models import ARCHITECTURES, VOCAB_SIZE, make_model


def make_runner(num_rows: int, dtype: torch.dtype = torch.float32) -> ModelRunner:
    model = prepare_model(make_model(dtype=dtype), EngineConfig())
    return ModelRunner(model, KVCache(model.kv_shape, num_rows, model.dtype, model.device))


def make_exact_runner() -> ModelRunner:
    """Of a model whose sizes are whole vectors of any processor: our kernels compute each of its
    rows alike, however many there are."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    model = prepare_model(make_model(dtype=torch.float32, **sizes), EngineConfig(exact=True))
    return ModelRunner(model, KVCache(model.kv_shape, 1024, model.dtype, model.device))


def logits_of(runner: ModelRunner, num_drafts: int) -> torch.Tensor:
    """The root's logits after a context of nine tokens, with drafts below it."""
    segment = runner.cache.rows.allocate(64)
    assert segment is not None
    runner.forward([Chunk(segment, 0, list(range(1, 10)), None)])
    tree = DraftTree(7, num_drafts)
    tree.add_path(list(range(20, 20 + num_drafts)), Source.OTHER)
    (outputs,) = runner.forward([Chunk(segment, 9, [7], tree)])
    runner.cache.rows.free(segment)
    assert outputs is not None
    return outputs.logits[0]


def test_attention_that_is_fast_for_all_rows_says_nothing_of_products() -> None:
    """Exact forwards are other ones then, and have their price; only with AMX they are the same."""
    model = prepare_model(make_model(dtype=torch.bfloat16, head_dim=64), EngineConfig())
    model = replace(model, max_attended_rows=UNLIMITED)
    cache = KVCache(model.kv_shape, 64, model.dtype, model.device)
    assert CpuTreeAttention.can_read(cache)
    has_amx = has_amx_bf16(model.device, model.dtype)
    assert ModelRunner(model, cache).attends_with_amx is has_amx


def test_drafts_change_no_bit_at_the_shapes_that_are_found() -> None:
    """Whatever this machine's kernels do, a token's logits do not depend on its drafts."""
    runner = make_runner(512)
    found = find_exact_shapes(runner, exact_candidates(64))
    assert runner.cache.rows.num_free == runner.cache.num_rows
    if found is None:
        pytest.skip("no two row counts agree on this machine")
    assert set(found.row_counts) <= set(exact_candidates(64).row_counts)
    runner.shapes = found
    plain = logits_of(runner, 0)
    assert all(torch.equal(logits_of(runner, number), plain) for number in (1, 5, 30))


def test_all_numbers_of_rows_agree_where_sizes_are_whole_vectors() -> None:
    assert find_exact_shapes(make_exact_runner(), exact_candidates(64)) == exact_candidates(64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_with_siblings_come_out_as_if_decoded_plainly(dtype: torch.dtype) -> None:
    """A node's ancestors lie apart in a tree and beside each other later; no bit shows it."""
    runner = make_runner(1024, dtype)
    found = find_exact_shapes(runner, exact_candidates(64))
    if found is None:
        pytest.skip("no two row counts agree on this machine")
    runner.shapes = found
    generator = random.Random(3)
    for length in (9, 120, 300):
        context = [generator.randrange(VOCAB_SIZE) for _ in range(length)]
        segment = runner.cache.rows.allocate(length + 64)
        assert segment is not None
        runner.forward([Chunk(segment, 0, context, None)])
        tree, path = DraftTree(7, 30), [0]
        while len(path) <= 5:
            for _ in range(generator.randrange(1, 5)):
                tree.add_node(path[-1], generator.randrange(VOCAB_SIZE), Source.OTHER)
            path.append(generator.choice(children(tree, path[-1])))
        (drafted,) = runner.forward([Chunk(segment, length, [7], tree)])
        assert drafted is not None
        for depth, node in enumerate(path):
            token = tree.token_ids[node]
            chunk = Chunk(segment, length + depth, [token], DraftTree(token, 0))
            (plain,) = runner.forward([chunk])
            assert plain is not None
            assert torch.equal(drafted.logits[node], plain.logits[0])
        runner.cache.rows.free(segment)


def children(tree: DraftTree, node: int) -> list[int]:
    return [child for child, parent in enumerate(tree.parents) if parent == node]


def test_counts_that_do_not_fit_are_left_out() -> None:
    """A cache too small for the largest forward is no reason to give up on the others."""
    large, small = make_runner(1024), make_runner(160)
    candidates = exact_candidates(200)
    everything, found = (find_exact_shapes(runner, candidates) for runner in (large, small))
    if everything is None:
        pytest.skip("no two row counts agree on this machine")
    assert found is not None
    assert set(found.row_counts) <= {count for count in everything.row_counts if count <= 96}


def test_a_cache_without_room_to_try_is_said() -> None:
    """Nothing fits, which does not blame the machine alone."""
    with pytest.raises(ConfigError, match="that fit into the KV cache"):
        choose_shapes(make_runner(32), 64, exact=True)


def qwen3_moe() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(vocab_size=64, **sizes, **heads, **experts, head_dim=16)
    return Qwen3MoeForCausalLM(config).eval()


def _depends_on_rows(
    _module: torch.nn.Module, _inputs: object, output: torch.Tensor
) -> torch.Tensor:
    return output * (1 + 1e-3 * output.shape[1])


@pytest.mark.parametrize("exact", [True, "auto"])
def test_a_model_whose_rows_are_never_equal_is_not_called_exact(
    caplog: pytest.LogCaptureFixture, exact: Literal[True, "auto"]
) -> None:
    """No shapes are trusted that were not seen to hold; the trial leaves nothing in the cache."""
    module = make_model()
    module.model.norm.register_forward_hook(_depends_on_rows)
    model = prepare_model(module, EngineConfig())
    runner = ModelRunner(model, KVCache(model.kv_shape, 1024, model.dtype, model.device))
    if exact is True:
        with pytest.raises(ConfigError, match="answers cannot be exact"):
            choose_shapes(runner, 64, exact)
    else:
        with caplog.at_level(logging.INFO):
            assert choose_shapes(runner, 64, exact) is runner.shapes
        assert "not exact" in caplog.text
    assert runner.cache.rows.num_free == runner.cache.num_rows
    assert not runner.shapes.is_exact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_of_experts_is_not_called_exact(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No trial says how many rows each expert will have."""
    module = qwen3_moe().to(getattr(torch, dtype))
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM has experts"):
        make_engine(model=module, exact=True)
    with caplog.at_level(logging.INFO):
        assert not make_engine(model=module, exact="auto").is_exact
    assert "not exact" in caplog.text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_mixtures_of_experts_have_experts(architecture: str) -> None:
    """Not the eyes of a model that text goes past, nor prepacked weights."""
    for dtype in (torch.float32, torch.bfloat16):
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
        model = make_model(architecture, dtype, **sizes)
        prepared = prepare_model(model, EngineConfig(exact=True))
        assert has_experts(prepared.module) is (architecture == "gpt_oss")


def test_a_prepacked_embedding_is_no_expert() -> None:
    """The bundled model reads the weights of its last layer there."""
    config = ModelConfig(
        name="a", model="hdserve-tiny", engine=EngineConfig(dtype="bfloat16", exact=True)
    )
    assert not has_experts(load_model(config).module)


def test_what_auto_chooses_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact forwards where they cost next to nothing, and else those there are."""
    runner = make_exact_runner()
    monkeypatch.setattr(exactness, "_AFFORDABLE_COST", 0.0)
    assert choose_shapes(runner, 64, exact="auto") is runner.shapes
    monkeypatch.setattr(exactness, "_AFFORDABLE_COST", math.inf)
    chosen = choose_shapes(runner, 64, exact="auto")
    assert runner.cache.rows.num_free == runner.cache.num_rows
    assert chosen.is_exact
    runner.shapes = chosen
    plain = logits_of(runner, 0)
    assert all(torch.equal(logits_of(runner, number), plain) for number in (1, 5, 30))


def test_layers_that_no_kernel_computes_have_numbers_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPT-2's are no linear layers to PyTorch; a trial may find them independent by chance."""
    monkeypatch.setattr(exactness, "find_exact_shapes", lambda _runner, candidates: candidates)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=512)
    model = prepare_model(GPT2LMHeadModel(config).bfloat16().eval(), EngineConfig(exact=True))
    runner = ModelRunner(model, KVCache(model.kv_shape, 512, model.dtype, model.device))
    assert choose_shapes(runner, 64, exact=True).row_counts

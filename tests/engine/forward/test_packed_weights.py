"""Models whose weights are packed for the processor's tiles: exact, however work is cut."""

from __future__ import annotations

from concurrent.futures import Future
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hdserve.config import EngineConfig
from hdserve.core import Sequence
from hdserve.drafting.base import Drafter
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.forward import compiled
from hdserve.engine.forward.compiled import can_compile, can_pack
from hdserve.engine.hardware.devices import has_amx_bf16
from hdserve.engine.linear.shared import linear_layers_of
from hdserve.engine.loading.compilation import CompilationResult, compile_in_background
from hdserve.engine.loading.loader import prepare_model
from hdserve.engine.native.compiler import vector_instructions
from tests.drafters import OracleDrafter
from tests.engines import make_engine, make_prompt, make_sequence, run
from tests.models import VOCAB_SIZE, make_model

needs_amx = pytest.mark.skipif("not has_tiles()", reason="processor or compiler has no AMX")
pytestmark = [
    pytest.mark.skipif(not can_compile(), reason="there is no C++ compiler"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]

NUM_SEQUENCES = 12


@cache
def has_tiles() -> bool:
    """Whether the processor has AMX, and the C++ compiler knows it, which takes seconds to find
    out."""
    has_amx = has_amx_bf16(torch.device("cpu"), torch.bfloat16)
    return has_amx and "amx" in vector_instructions()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """With keys and values of a size that fits into tiles."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().bfloat16()


@pytest.fixture(scope="module")
def compilation(model: torch.nn.Module) -> CompilationResult:
    return compile_in_background(
        prepare_model(model, EngineConfig()), EngineConfig(max_num_sequences=2), 4, 64, 512, False
    ).result(240)


def decode(
    model: torch.nn.Module,
    compilation: CompilationResult,
    drafters: list[Drafter] | None = None,
    **options: int,
) -> dict[str, list[int]]:
    """What sequences of prompts of different lengths come out as."""
    ready: Future[CompilationResult] = Future()
    ready.set_result(compilation)
    engine = make_engine(drafters or [], model=model, exact="auto", compilation=ready, **options)
    sequences = make_sequences()
    run(engine, sequences)
    assert engine.is_exact
    return {seq.request_id: seq.output_token_ids for seq in sequences}


def make_sequences() -> list[Sequence]:
    return [
        make_sequence(str(number), make_prompt(3 + 9 * number, number), max_tokens=40)
        for number in range(NUM_SEQUENCES)
    ]


@needs_amx
def test_they_are_found_exact(compilation: CompilationResult) -> None:
    assert compilation.compiled.is_packed
    assert compilation.shapes == Shapes(is_exact=True, min_rows=2)


@needs_amx
def test_neither_drafts_nor_neighbours_nor_cuts_change_a_token(
    model: torch.nn.Module, compilation: CompilationResult
) -> None:
    """In bfloat16, where the two likeliest tokens of a random model are often as good as equal."""
    plain = decode(model, compilation, max_num_sequences=1, prefill_chunk_tokens=64)
    assert len({tuple(tokens) for tokens in plain.values()}) == NUM_SEQUENCES
    for chunk_tokens in (1, 7, 16, 200):
        assert decode(model, compilation, prefill_chunk_tokens=chunk_tokens) == plain
    wanted = {seq.request_id: seq.token_ids + plain[seq.request_id] for seq in make_sequences()}
    oracle = OracleDrafter(wanted, length=5)
    for number in (1, 5, NUM_SEQUENCES):
        assert decode(model, compilation, [oracle], max_num_sequences=number) == plain


def test_only_what_amx_multiplies_is_packed() -> None:
    """Weights in other precisions and layers that are no plain ones are left."""
    assert can_pack(make_model(dtype=torch.bfloat16)) == has_tiles()
    assert not can_pack(make_model(dtype=torch.float32))
    assert not can_pack(torch.nn.Sequential(torch.nn.ReLU()))


def test_nothing_is_packed_where_the_compiler_uses_no_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the layers of exact models are our kernels then."""
    monkeypatch.setattr(compiled, "vector_instructions", lambda: "avx512")
    assert not can_pack(make_model(dtype=torch.bfloat16))
    kinds = []
    for compiles in (True, False):
        config = EngineConfig(exact=True, compile=compiles)
        module = prepare_model(make_model(dtype=torch.bfloat16), config).module
        kinds.append([type(layer) for layer in linear_layers_of(module)])
    assert kinds[0] == kinds[1]


@needs_amx
def test_exact_models_are_packed_if_they_are_compiled_at_first() -> None:
    """Else the kernel multiplies, so that the first request has the bits of the last."""
    for compiles in (True, "auto"):
        loaded = prepare_model(
            make_model(dtype=torch.bfloat16), EngineConfig(exact=True, compile=compiles)
        )
        assert can_pack(loaded.module) == (compiles is True)

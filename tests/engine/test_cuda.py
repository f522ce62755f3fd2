"""What only a GPU can show: `pytest -m gpu tests/engine/test_cuda.py` is the proof of ADR 24."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hdserve.config import EngineConfig, ModelConfig
from hdserve.core import Sequence, Source
from hdserve.drafting.base import Drafter
from hdserve.engine import gpu_kernels
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.build import build_engine
from hdserve.engine.engine import Engine
from hdserve.engine.forward.compiled import CompiledForward
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.forward.node_outputs import NodeOutputs
from hdserve.engine.hardware.memory import free_bytes
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.loading.cache_size import forward_bytes
from hdserve.engine.loading.compilation import compile_model
from hdserve.engine.loading.forward_cost import measure_forward_cost
from hdserve.engine.loading.loader import load_model, prepare_model
from hdserve.errors import ConfigError
from hdserve.tree import DraftTree
from tests.drafters import OracleDrafter
from tests.engines import make_prompt, make_sequence, run
from tests.models import ARCHITECTURES, make_model

if torch.cuda.is_available() and gpu_kernels.are_available(torch.device("cuda")):
    from hdserve.engine.gpu_kernels.multiply import can_multiply

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

_MAX_ROWS = 64
_TOLERANCE = 2e-3
"""Of float32 logits, which other kernels round otherwise."""


_WIDE_HEADS = {
    "qwen2": {"hidden_size": 64},
    "gemma4": {"head_dim": 16, "global_head_dim": 32},
    "deepseek": {"v_head_dim": 16},
    "gpt_neox": {"hidden_size": 64},
    "stablelm": {"hidden_size": 64},
}
"""A GPU multiplies no fewer than 16 numbers at a time, so FlexAttention takes no smaller heads."""

_BRANCHING = {"gpt_oss"}
"""Those that call their experts, as they are set here, by what they computed."""


def load(architecture: str = "llama", dtype: torch.dtype = torch.float32) -> LoadedModel:
    options = _WIDE_HEADS.get(architecture, {"head_dim": 16})
    return prepare_model(make_model(architecture, dtype, **options).to("cuda"), EngineConfig())


def make_runner(
    model: LoadedModel,
    *,
    attends_in_one_call: bool | None = None,
    compiled: CompiledForward | None = None,
) -> ModelRunner:
    """One that has been warmed up."""
    cache = KVCache(model.kv_shape, 2048, model.dtype, model.device)
    runner = ModelRunner(model, cache, attends_in_one_call=attends_in_one_call)
    runner.compile_with(compiled)
    runner.warm_up(_MAX_ROWS)
    return runner


def make_work(
    runner: ModelRunner, num_sequences: int = 3, num_nodes: int = 7, num_tokens: int = 20
) -> list[Chunk]:
    """A tree for each sequence, after a prompt of its own, of ``num_tokens`` at least."""
    chunks = []
    for number in range(num_sequences):
        segment = runner.cache.rows.allocate(num_tokens + 44 + num_nodes)
        assert segment is not None
        prompt = make_prompt(num_tokens + 9 * number, number)
        runner.forward([Chunk(segment, 0, prompt, None)])
        tree = DraftTree(3, num_nodes)
        tree.add_path([4 + number, 5, 6], Source.OTHER)
        tree.add_path([4 + number, 7], Source.OTHER)
        chunks.append(Chunk(segment, len(prompt), [3], tree))
    return chunks


def logits_of(runner: ModelRunner, chunks: list[Chunk]) -> torch.Tensor:
    found = [outputs.logits for outputs in runner.forward(chunks) if outputs is not None]
    return torch.cat(found).cpu()


def has_graphs(runner: ModelRunner) -> bool:
    """Whether none failed."""
    graphs = runner._graphs
    return graphs is not None and bool(graphs._graphs) and not graphs._has_failed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graphs_give_what_sequences_give_one_by_one(architecture: str, dtype: torch.dtype) -> None:
    """Several times, since a graph reads what lies in the same place each time.  A model of which
    none can be made runs without, on the stream it ran on before."""
    model = load(architecture, dtype)
    plain, graphs = make_runner(model, attends_in_one_call=False), make_runner(model)
    assert graphs.attends_in_one_call
    assert has_graphs(graphs) == (architecture not in _BRANCHING)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    tolerance = _TOLERANCE if dtype == torch.float32 else 0.25
    for number in (1, 3, 2, 3):
        wanted = logits_of(plain, make_work(plain, number))
        found = logits_of(graphs, make_work(graphs, number))
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
        plain.cache.rows.free_all()
        graphs.cache.rows.free_all()


def test_batched_rows_are_those_of_single_sequences() -> None:
    runner = make_runner(load())
    chunks = make_work(runner)
    alone = torch.cat([logits_of(runner, [chunk]) for chunk in chunks])
    torch.testing.assert_close(logits_of(runner, chunks), alone, atol=_TOLERANCE, rtol=_TOLERANCE)


@pytest.fixture(scope="module")
def compiled() -> tuple[LoadedModel, CompiledForward]:
    model = load()
    return model, compile_model(model)


def test_graphs_are_made_of_the_compiled_model(
    compiled: tuple[LoadedModel, CompiledForward],
) -> None:
    model, forward = compiled
    plain, graphs = (
        make_runner(model, attends_in_one_call=False),
        make_runner(model, compiled=forward),
    )
    assert has_graphs(graphs)
    with torch.compiler.set_stance("fail_on_recompile"):
        found = logits_of(graphs, make_work(graphs))
    wanted = logits_of(plain, make_work(plain))
    torch.testing.assert_close(found, wanted, atol=_TOLERANCE, rtol=_TOLERANCE)


@pytest.fixture(scope="module")
def multiplied() -> tuple[LoadedModel, CompiledForward]:
    """One in bfloat16 whose products are all made by the kernel."""
    sizes = {"hidden_size": 256, "intermediate_size": 352, "head_dim": 64, "vocab_size": 128}
    module = make_model("llama", torch.bfloat16, **sizes).to("cuda")
    layers = [each for each in module.modules() if isinstance(each, torch.nn.Linear)]
    assert all(can_multiply([layer.weight]) for layer in layers)
    model = prepare_model(module, EngineConfig())
    return model, compile_model(model)


def test_what_a_draft_gives_is_what_its_token_gives_decoded_alone(
    multiplied: tuple[LoadedModel, CompiledForward],
) -> None:
    """Bit for bit, in bfloat16, along each path, by the kernels and compiled code."""
    model, forward = multiplied
    runner = make_runner(model, compiled=forward)
    assert has_graphs(runner)
    (chunk,) = make_work(runner, 1, num_tokens=600)
    drafted, tree = logits_of(runner, [chunk]), chunk.tree
    assert tree is not None
    for leaf in range(len(tree)):
        for depth, node in enumerate(tree.path_to(leaf)):
            token_id = tree.token_ids[node]
            column = chunk.first_column + depth
            alone = Chunk(chunk.segment, column, [token_id], DraftTree(token_id, 0))
            assert torch.equal(logits_of(runner, [alone])[0], drafted[node])
    plain = make_runner(model, attends_in_one_call=False)
    wanted = logits_of(plain, make_work(plain, 1, num_tokens=600))
    torch.testing.assert_close(drafted, wanted, atol=0.25, rtol=0.25)


def make_gpu_engine(
    model: LoadedModel,
    drafters: tuple[Drafter, ...] = (),
    compiled: CompiledForward | None = None,
    kv_cache_tokens: int | None = 2048,
) -> Engine:
    engine = EngineConfig(exact=False, kv_cache_tokens=kv_cache_tokens, max_num_sequences=4)
    config = ModelConfig(name="test", model="test", engine=engine)
    return build_engine(config, model, drafters, compiled=compiled)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["modules", "compiled"])
@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9, "top_k": 20}, {"logprobs": 2}],
    ids=str,
)
def test_drafted_is_plain(
    params: dict[str, object],
    is_compiled: bool,
    compiled: tuple[LoadedModel, CompiledForward],
) -> None:
    """In float32, in which kernels of other shapes hardly ever choose another token."""
    model, forward = compiled
    used = forward if is_compiled else None

    def sequences() -> list[Sequence]:
        return [
            make_sequence(name, make_prompt(12 + seed, seed), **{"seed": seed, **params})
            for seed, name in enumerate("abc")
        ]

    wanted = {}
    plain = make_gpu_engine(model, compiled=used)
    for seq in sequences():
        run(plain, [seq])
        wanted[seq.request_id] = seq.token_ids
    engine = make_gpu_engine(model, (OracleDrafter(wanted),), used)
    found = sequences()
    run(engine, found)
    assert {seq.request_id: seq.token_ids for seq in found} == wanted
    assert engine.stats.drafts.num_accepted_tokens > 0


def logits_by_position(engine: Engine, seq: Sequence) -> Iterator[tuple[int, torch.Tensor]]:
    """What the model made of each token of ``seq`` at each time it went through as a node of a
    tree, the decoding of ``seq`` included."""
    seen: list[tuple[Chunk, torch.Tensor]] = []
    forward = engine._runner.forward

    def recorded(chunks: list[Chunk], num_top: int = 1) -> list[NodeOutputs | None]:
        found = forward(chunks, num_top)
        for chunk, outputs in zip(chunks, found, strict=True):
            if outputs is not None:
                seen.append((chunk, outputs.logits.cpu()))
        return found

    engine._runner.forward = recorded  # type: ignore[assignment, method-assign]
    run(engine, [seq])
    for chunk, logits in seen:
        tree, root = chunk.tree, chunk.first_column + len(chunk.token_ids) - 1
        assert tree is not None, "it has outputs"
        for node in range(len(tree)):
            path = [tree.token_ids[each] for each in tree.path_to(node)]
            if path == seq.token_ids[root : root + len(path)]:
                yield root + len(path) - 1, logits[node]


@pytest.mark.parametrize("num_tokens", [20, 60, 100, 200])
def test_drafts_change_no_bit_of_a_sequence(
    num_tokens: int, multiplied: tuple[LoadedModel, CompiledForward]
) -> None:
    """Nor of what its accepted drafts gave, whatever kernels its prompt went through."""
    model, forward = multiplied
    prompt = make_prompt(num_tokens, num_tokens)
    plain = make_sequence("a", prompt, temperature=1.0, seed=1)
    wanted = dict(logits_by_position(make_gpu_engine(model, compiled=forward), plain))
    drafted = make_sequence("a", prompt, temperature=1.0, seed=1)
    engine = make_gpu_engine(model, (OracleDrafter({"a": plain.token_ids}),), forward)
    found = [*logits_by_position(engine, drafted)]
    assert drafted.token_ids == plain.token_ids
    assert engine.stats.drafts.num_accepted_tokens > 0
    assert len(found) >= len(wanted)
    for position, logits in found:
        assert position not in wanted or torch.equal(logits, wanted[position])


def test_the_cost_is_measured() -> None:
    """More than nothing, and a forward of many rows is not taken for much cheaper than of one."""
    cost = measure_forward_cost(make_runner(load()), 17, 4)
    one, few, many = cost([1, 2, 17], 1)
    assert one > 0
    assert min(few, many) > one / 2


def test_a_full_batch_fits_beside_the_cache() -> None:
    """What is left to forwards suffices for the largest one, sampled."""
    model = load()
    engine = make_gpu_engine(model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(
        engine,
        [make_sequence(name, make_prompt(30), temperature=1.0, top_p=0.9) for name in "abcd"],
    )
    assert torch.cuda.max_memory_allocated() - before <= forward_bytes(model, 4, 16)


def test_the_cache_leaves_room_where_nobody_says_how_large_it_is() -> None:
    engine = make_gpu_engine(load(), kv_cache_tokens=None)
    seq = make_sequence("a", make_prompt(30))
    run(engine, [seq])
    assert seq.num_output_tokens == 24
    assert torch.cuda.mem_get_info()[0] > 0


def test_an_engine_leaves_its_memory_to_the_next() -> None:
    """At once, KV cache and graphs; what PyTorch keeps of it is free for others."""
    model = load()
    make_gpu_engine(model)
    num_used = torch.cuda.memory_allocated()
    num_free = free_bytes(model.device)
    engine = make_gpu_engine(model, kv_cache_tokens=1 << 20)
    assert torch.cuda.memory_allocated() > num_used + 2**28
    del engine
    assert torch.cuda.memory_allocated() <= num_used + 2**27
    assert free_bytes(model.device) > num_free - 2**28


def test_a_model_that_does_not_fit_is_a_user_error(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=200_000, hidden_size=32, intermediate_size=48, num_hidden_layers=1
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-9)
    try:
        with pytest.raises(ConfigError, match="out of memory"):
            load_model(ModelConfig(name="test", model=str(tmp_path)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

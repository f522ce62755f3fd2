"""A compiled model gives what the model gives, and an engine switches to it in mid-sequence."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._inductor import metrics
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hdserve.config import DraftingConfig, EngineConfig, ModelConfig
from hdserve.core import Source
from hdserve.drafting.batch_cost import BatchCost, ForwardCost
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.batch.step_context import running
from hdserve.engine.build import build_engine
from hdserve.engine.forward import repeated_layers
from hdserve.engine.forward.compiled import CompiledForward, can_compile
from hdserve.engine.forward.graphs_by_rows import GraphsByRows
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.forward.repeated_layers import repeat_layers, should_repeat, unroll_layers
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.shape import KVShape
from hdserve.engine.loading import compilation as compiling
from hdserve.engine.loading.compilation import (
    CompilationResult,
    compile_in_background,
    compile_model,
)
from hdserve.engine.loading.exactness import choose_shapes
from hdserve.engine.loading.loader import prepare_model
from hdserve.engine.loading.model_check import check_packed_forward
from hdserve.engine.native.operators import load_operators
from hdserve.errors import UnsupportedModel
from hdserve.tree import DraftTree
from tests.drafters import OracleDrafter
from tests.engine.helpers import RecordingDrafter
from tests.engine.loading.test_loader import llama
from tests.engines import make_engine, make_prompt, make_sequence, plain_tokens, run
from tests.models import ARCHITECTURES, VOCAB_SIZE, make_model

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

needs_compiler = pytest.mark.skipif(not can_compile(), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model()


@pytest.fixture(scope="module")
def cache_rows() -> list[int]:
    """Of the caches that compiling makes."""
    return []


@pytest.fixture(scope="module")
def compilation(model: torch.nn.Module, cache_rows: list[int]) -> Future[CompilationResult]:
    """Compiled in a thread beside this one, with the cost of its forwards."""
    if not can_compile():
        pytest.skip("there is no C++ compiler")

    class Cache(KVCache):
        def __init__(self, shape: KVShape, num_rows: int, *others: Any) -> None:
            cache_rows.append(num_rows)
            super().__init__(shape, num_rows, *others)

    loaded = prepare_model(model, EngineConfig())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiling, "KVCache", Cache)
        found = compile_in_background(loaded, EngineConfig(max_num_sequences=8), 4, 64, 600, True)
        found.result(240)
    return found


@pytest.fixture
def compiled(compilation: Future[CompilationResult]) -> CompiledForward:
    return compilation.result().compiled


PROBE = """
import os
from torch._inductor.loop_body import InterpreterShim
from hdserve.config import EngineConfig
from hdserve.engine.loading.compilation import compile_in_background
from hdserve.engine.loading.loader import prepare_model
from tests.models import make_model

config = EngineConfig()
compile_in_background(prepare_model(make_model(), config), config, 4, 64, 512, False)
print(InterpreterShim._dummy_gm.cache_info().currsize, flush=True)
os._exit(0)
"""


def test_what_is_measured_takes_no_more_memory_than_the_engine(
    compilation: Future[CompilationResult], cache_rows: list[int]
) -> None:
    """Eight sequences would take 1,280 rows."""
    assert compilation.done()
    assert max(cache_rows) == 600


@needs_compiler
def test_what_is_traced_is_traced_before() -> None:
    """PyTorch's tracer takes part in every call of a module, in all threads, and fails at modules
    it does not know: what the compiler traces so, once in a process, it may not trace while an
    engine runs forwards."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def make_runner(model: torch.nn.Module) -> tuple[LoadedModel, ModelRunner]:
    loaded = prepare_model(model, EngineConfig())
    return loaded, ModelRunner(loaded, KVCache(loaded.kv_shape, 2048, loaded.dtype, loaded.device))


def make_work(runner: ModelRunner, num_nodes: int, num_sequences: int) -> Iterator[Chunk]:
    for number in range(num_sequences):
        segment = runner.cache.rows.allocate(64 + num_nodes)
        assert segment is not None
        prompt = make_prompt(20 + number, number)
        runner.forward([Chunk(segment, 0, prompt, None)])
        tree = DraftTree(3, num_nodes)
        for node in range(num_nodes):
            tree.add_path([4 + node, 5], Source.OTHER)
        yield Chunk(segment, len(prompt), [3], tree)


@pytest.mark.parametrize(
    ("num_nodes", "num_sequences"), [(0, 1), (1, 1), (2, 1), (9, 1), (40, 1), (0, 2), (7, 5)]
)
def test_same_logits(
    model: torch.nn.Module, compiled: CompiledForward, num_nodes: int, num_sequences: int
) -> None:
    """For trees and batches of any size, by what was made at first."""
    _, runner = make_runner(model)
    chunks = list(make_work(runner, num_nodes, num_sequences))
    plain = runner.forward(chunks)
    runner.compiled = compiled
    for wanted, found in zip(plain, runner.forward(chunks), strict=True):
        assert wanted is not None
        assert found is not None
        torch.testing.assert_close(found.logits, wanted.logits, atol=1e-5, rtol=1e-5)


def test_no_number_of_rows_compiles_again(
    model: torch.nn.Module, compiled: CompiledForward
) -> None:
    """Not that of a prompt that ends without a choice, nor that of a large batch."""
    _, runner = make_runner(model)
    runner.compiled = compiled
    segment = runner.cache.rows.allocate(200)
    assert segment is not None
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (1, 2, 3, 17, 64):
            runner.forward([Chunk(segment, 0, make_prompt(length), None)])
            runner.forward([Chunk(segment, 0, make_prompt(length), DraftTree(3, 0))])
        for num_nodes in (0, 5, 30):
            runner.forward(list(make_work(runner, num_nodes, 3)))


@pytest.mark.parametrize(
    ("instructions", "spaced", "told"),
    [
        ("", [], ["PyTorch's compiler finds no vector instructions that it can use"]),
        ("", ["/a b", "/c d"], ["PyTorch's compiler cannot use paths with spaces: /a b, /c d"]),
        ("avx2", [], []),
    ],
)
def test_code_without_vector_instructions_is_told(
    instructions: str,
    spaced: list[str],
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compiling, "find_compiler", lambda: "g++")
    monkeypatch.setattr(compiling, "vector_instructions", lambda: instructions)
    monkeypatch.setattr(compiling, "spaced_directories", lambda: spaced)
    monkeypatch.setattr(compiling, "_compile", lambda *_, **__: None)
    compiling.compile_model(prepare_model(make_model(num_hidden_layers=1), EngineConfig()))
    assert [text.partition(", so")[0] for text in caplog.messages] == told


@needs_compiler
def test_one_row_is_a_number_of_rows_like_any_other() -> None:
    """One graph serves all, so that a row rounds alike by itself and beside others."""
    loaded, _ = make_runner(make_model(num_hidden_layers=1))
    torch._dynamo.utils.counters.clear()
    compile_model(loaded)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_what_others_register_compiles_nothing_again(
    model: torch.nn.Module, compiled: CompiledForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that is made anew lacks what it was made with at first: weights in another order."""
    _, runner = make_runner(model)
    runner.compiled = compiled
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.setitem(table._global_mapping, "another", None)
    with torch.compiler.set_stance("fail_on_recompile"):
        check_packed_forward(runner)
        runner.forward(list(make_work(runner, 5, 1)))


@needs_compiler
@pytest.mark.parametrize("is_repeating", [False, True])
def test_forwards_of_a_known_size_go_straight_to_the_graph(
    is_repeating: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And give the same bits; those of another size go by PyTorch first, which may make another
    graph."""
    loaded, runner = make_runner(make_model(num_hidden_layers=2))
    runner.compiled = compiled = compile_model(loaded, is_repeating=is_repeating)
    chunks = list(make_work(runner, 5, 2))
    wanted = runner.forward(chunks)
    through_pytorch = compiled._forward
    sizes: list[tuple[int, ...]] = []

    def note(*inputs: torch.Tensor) -> torch.Tensor:
        sizes.append(tuple(len(each) for each in inputs))
        return through_pytorch(*inputs)

    monkeypatch.setattr(compiled, "_forward", note)
    for before, after in zip(wanted, runner.forward(chunks), strict=True):
        assert before is not None
        assert after is not None
        assert torch.equal(after.logits, before.logits)
    assert not sizes
    for _ in range(2):
        runner.forward(chunks[:1])
    assert sizes == [(6, 6, 6)]
    batch = runner._batch(chunks)
    with torch.inference_mode(), running(batch.plan), compiled.compiling():
        through_pytorch(batch.token_ids.int(), batch.position_ids, batch.logit_rows)
    assert compiled._direct is None


@needs_compiler
def test_a_graph_that_gives_more_than_logits_is_called_by_pytorch() -> None:
    """As where ``longrope`` stores its frequencies in the model, in every forward."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    limits = {"rope_theta": 10000.0, "original_max_position_embeddings": 128}
    model = llama(rope_parameters={"rope_type": "longrope", **factors, **limits})
    loaded, runner = make_runner(model.eval())
    runner.compile_with(compile_model(loaded))
    chunks = list(make_work(runner, 2, 1))
    (first,) = runner.forward(chunks)
    (again,) = runner.forward(chunks)
    assert first is not None
    assert again is not None
    assert torch.equal(again.logits, first.logits)


def make_chain(runner: ModelRunner, num_rows: int) -> Chunk:
    """A tree of one path after a prompt, always the same but for its length."""
    segment = runner.cache.rows.allocate(20 + num_rows)
    assert segment is not None
    prompt = make_prompt(20)
    runner.forward([Chunk(segment, 0, prompt, None)])
    tree = DraftTree(3, num_rows - 1)
    tree.add_path([4 + node % 50 for node in range(num_rows - 1)], Source.OTHER)
    return Chunk(segment, len(prompt), [3], tree)


@pytest.fixture(scope="module")
def native_runner() -> ModelRunner:
    """Of a model whose operators are our kernels."""
    if not can_compile():
        pytest.skip("there is no C++ compiler")
    config = EngineConfig(exact=True)
    loaded = prepare_model(make_model(dtype=torch.float32, vocab_size=64), config)
    runner = ModelRunner(loaded, KVCache(loaded.kv_shape, 2048, loaded.dtype, loaded.device))
    compiled = compile_model(loaded)
    assert compiled.is_native is (load_operators() is not None)
    if not compiled.is_native:
        pytest.skip("operators run in Python here")
    runner.compiled, runner.shapes = compiled, Shapes(is_exact=True)
    return runner


def test_few_rows_have_code_of_their_own_and_the_same_bits(native_runner: ModelRunner) -> None:
    assert native_runner.compiled is not None
    direct = native_runner.compiled._direct
    assert direct is not None
    graphs = direct._run
    assert isinstance(graphs, GraphsByRows)
    logits = []
    for num_rows in (graphs.max_few, graphs.max_few + 1):
        chain = make_chain(native_runner, num_rows)
        for _ in range(2):  # by PyTorch and straight to the graph
            (outputs,) = native_runner.forward([chain])
            assert outputs is not None
            assert len(outputs.logits) == num_rows
            logits.append(outputs.logits[: graphs.max_few])
    assert all(torch.equal(each, logits[0]) for each in logits)


def test_compiled_code_calls_operators_itself(native_runner: ModelRunner) -> None:
    """Not through PyTorch's dispatcher, which is noted where an operator leaves its work to
    Python."""
    chain = make_chain(native_runner, 5)
    native_runner.forward([chain])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        native_runner.forward([chain])
    noted = {event.key for event in profile.key_averages()}
    assert noted
    ours = {name for name in noted if name.startswith("hdserve::")}
    assert not [name for name in ours if not name.endswith("_in_python")]


@needs_compiler
def test_what_is_compiled_can_be_kept() -> None:
    """In PyTorch's cache, under a key made of the graph and of all options."""
    loaded, _ = make_runner(make_model(num_hidden_layers=1))
    counters = torch._dynamo.utils.counters
    counters.clear()
    compile_model(loaded)
    found = counters["inductor"]
    assert found["fxgraph_cache_hit"] or found["fxgraph_cache_miss"]
    assert not found["fxgraph_cache_bypass"]


@needs_compiler
def test_a_model_that_is_no_longer_used_is_not_kept() -> None:
    """PyTorch keeps what it has made, for the code of the model."""
    loaded, runner = make_runner(make_model(num_hidden_layers=1))
    runner.compiled = compile_model(loaded)
    runner.forward(list(make_work(runner, 5, 1)))
    weight = weakref.ref(next(loaded.module.parameters()))
    del loaded, runner
    gc.collect()
    assert weight() is None


@pytest.mark.usefixtures("compiled")
def test_a_second_model_is_watched_no_more_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, runner = make_runner(make_model(num_hidden_layers=1))
    runner.compiled = compile_model(loaded)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "another", None)
    with torch.compiler.set_stance("fail_on_recompile"):
        runner.forward(list(make_work(runner, 5, 1)))


@pytest.mark.parametrize("length", [2, 17, 64])
def test_prompts_are_scored_by_the_same_graphs(
    model: torch.nn.Module, compiled: CompiledForward, length: int
) -> None:
    """Inside a prompt and at its end."""
    _, runner = make_runner(model)
    segment = runner.cache.rows.allocate(64)
    assert segment is not None
    prompt = make_prompt(length)
    for tree, num_scored in ((None, length), (DraftTree(prompt[-1], 0), length - 1)):
        chunk = Chunk(segment, 0, prompt, tree, num_scored)
        runner.compiled = None
        (wanted,) = runner.forward([chunk])
        runner.compiled = compiled
        with torch.compiler.set_stance("fail_on_recompile"):
            (found,) = runner.forward([chunk])
        assert wanted is not None
        assert wanted.prompt_logits is not None
        assert found is not None
        assert found.prompt_logits is not None
        assert found.prompt_logits.shape == (num_scored, VOCAB_SIZE)
        torch.testing.assert_close(found.prompt_logits, wanted.prompt_logits, atol=1e-5, rtol=1e-5)


def test_graphs_are_made_of_it(model: torch.nn.Module, compiled: CompiledForward) -> None:
    """Not of the modules, of which each norm is some kernels on a GPU; with the attention that a
    GPU has, which is no variable of the compiled model."""
    loaded, runner = make_runner(model)
    chunks = list(make_work(runner, 3, 2))
    wanted = runner.forward(chunks)
    runner = ModelRunner(loaded, runner.cache, attends_in_one_call=True)
    runner.compile_with(compiled)
    calls: list[torch.nn.Module] = []
    handle = model.register_forward_pre_hook(lambda module, _: calls.append(module))
    with torch.inference_mode():
        batch = runner._batch(chunks)
        found, _ = runner._run(batch)
    handle.remove()
    assert batch.kind is not None
    assert not calls
    for outputs, part in zip(wanted, batch.packed.logit_slices, strict=True):
        assert outputs is not None
        torch.testing.assert_close(found[part], outputs.logits, atol=1e-5, rtol=1e-5)


def test_switch_to_compiled(model: torch.nn.Module, compilation: Future[CompilationResult]) -> None:
    """Between two steps, with drafts in flight; what comes out is what plain decoding gives."""
    sequences = [make_sequence(name, make_prompt(9, seed)) for seed, name in enumerate("ab")]
    wanted = plain_tokens(model, sequences)
    later: Future[CompilationResult] = Future()
    engine = make_engine([OracleDrafter(wanted, length=3)], model=model, compilation=later)
    for seq in sequences:
        engine.add(seq)
    for _ in range(3):
        engine.step()
    assert not engine.is_compiled
    later.set_result(compilation.result())
    engine.step()
    assert engine.is_compiled
    while engine.has_work:
        engine.step()
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted


def test_decoding_is_timed_anew_after_the_switch(
    model: torch.nn.Module, compilation: Future[CompilationResult]
) -> None:
    """Three steps leave the prompt out, as at first."""
    later: Future[CompilationResult] = Future()
    engine = make_engine(model=model, compilation=later)
    prompt = make_sequence("b", make_prompt(200))
    for seq in (make_sequence("a", make_prompt(1), max_tokens=100), prompt):
        engine.add(seq)
    num_cached = []
    for step in range(13):
        if step == 6:
            later.set_result(compilation.result())
        engine.step()
        num_cached.append(prompt.num_cached_tokens)
    grown = [after > before for before, after in itertools.pairwise([0, *num_cached])]
    assert grown == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 4


def test_exact_from_the_switch_on(
    model: torch.nn.Module, compilation: Future[CompilationResult]
) -> None:
    """What was computed before is not reused."""
    later: Future[CompilationResult] = Future()
    engine = make_engine(model=model, compilation=later)
    prompt = make_prompt(50)
    first, during = make_sequence("a", prompt), make_sequence("b", prompt)
    run(engine, [first])
    engine.add(during)
    engine.step()
    assert during.num_reused_tokens == 49
    later.set_result(replace(compilation.result(), shapes=Shapes(is_exact=True)))
    while engine.has_work:
        engine.step()
    assert engine.is_exact
    anew, again = make_sequence("c", prompt), make_sequence("d", prompt)
    wanted = plain_tokens(model, [again])
    run(engine, [anew])
    run(engine, [again])
    assert (anew.num_reused_tokens, again.num_reused_tokens) == (0, 49)
    assert again.token_ids == wanted["d"]


def test_an_exact_engine_switches_to_nothing_else(
    model: torch.nn.Module, compilation: Future[CompilationResult], caplog: pytest.LogCaptureFixture
) -> None:
    later: Future[CompilationResult] = Future()
    later.set_result(replace(compilation.result(), shapes=Shapes()))
    engine = make_engine(model=model, exact="auto", compilation=later)
    engine._runner.shapes = Shapes(is_exact=True)
    run(engine, [make_sequence("a", make_prompt(5))])
    assert engine.is_exact
    assert not engine.is_compiled
    assert "would not be exact" in caplog.text


def test_what_cannot_be_compiled_runs_as_it_is(model: torch.nn.Module) -> None:
    """The engine goes on when the compiler fails."""
    broken: Future[CompilationResult] = Future()
    broken.set_exception(UnsupportedModel("no"))
    seq = make_sequence("a", make_prompt(5))
    wanted = plain_tokens(model, [seq])
    engine = make_engine(model=model, compilation=broken)
    run(engine, [seq])
    assert not engine.is_compiled
    assert seq.token_ids == wanted["a"]


def test_a_drafter_that_reads_hidden_states_has_the_model_run_as_it_is(
    model: torch.nn.Module, compiled: CompiledForward, caplog: pytest.LogCaptureFixture
) -> None:
    """They are none of what a compiled model gives."""
    seq = make_sequence("a", make_prompt(5))
    wanted = plain_tokens(model, [seq])
    config = ModelConfig(
        name="m",
        model="m",
        engine=EngineConfig(kv_cache_tokens=512, exact=False),
        drafting=DraftingConfig(adapts_budget=False),
    )
    drafters = (RecordingDrafter(wanted),)
    engine = build_engine(config, prepare_model(model, config.engine), drafters, compiled=compiled)
    assert "a drafter reads its hidden states" in caplog.text
    run(engine, [seq])
    assert not engine.is_compiled
    assert seq.token_ids == wanted["a"]
    assert seq.counts.num_accepted_tokens > 0
    assert engine.stats.num_drafter_failures == {}


def test_its_cost_is_measured(compilation: Future[CompilationResult]) -> None:
    """The budget of an engine that switches follows the compiled model."""
    cost = compilation.result().cost
    assert isinstance(cost, BatchCost)
    one, tree = cost([1, 4], 1)
    assert 0 < one <= tree
    assert isinstance(cost._by_num_sequences[2], ForwardCost)


@needs_compiler
@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
def test_the_code_of_one_layer_is_made_for_all(architecture: str) -> None:
    """As it is for models of large layers, and on a GPU: each layer writes to its own cache, sees
    its own window, and no number of rows compiles again."""
    loaded, runner = make_runner(make_model(architecture))
    runner.compile_with(compile_model(loaded, is_repeating=True))
    layers = loaded.module.model.layers  # type: ignore[union-attr]
    assert all("forward" in vars(layer) for layer in layers)  # type: ignore[union-attr]
    for num_nodes, num_sequences in [(0, 1), (2, 1), (9, 1), (7, 5)]:
        chunks = list(make_work(runner, num_nodes, num_sequences))
        with torch.compiler.set_stance("fail_on_recompile"):
            found = runner.forward(chunks)
        compiled, runner.compiled = runner.compiled, None
        for outputs, wanted in zip(found, runner.forward(chunks), strict=True):
            assert outputs is not None
            assert wanted is not None
            torch.testing.assert_close(outputs.logits, wanted.logits, atol=1e-5, rtol=1e-5)
        runner.compiled = compiled


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize(("is_repeating", "are_equal"), [(True, True), (False, False)])
def test_more_layers_are_no_more_code(is_repeating: bool, are_equal: bool) -> None:
    counts = []
    for num_layers in (2, 4):
        metrics.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            model = make_model(num_hidden_layers=num_layers)
            compile_model(prepare_model(model, EngineConfig()), is_repeating=is_repeating)
        counts.append(metrics.generated_kernel_count)
    assert (counts[0] == counts[1]) == are_equal


@needs_compiler
@pytest.mark.slow
def test_a_model_whose_layers_share_more_than_code_is_compiled_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Layers of Gemma 4 hand their keys on."""
    loaded = prepare_model(make_model("gemma4", torch.float32), EngineConfig())
    compile_model(loaded, is_repeating=True)
    assert "cannot be reused for all layers" in caplog.text
    assert not any("forward" in vars(each) for each in loaded.module.modules())


def test_small_layers_are_not_called_from_python_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    prepare_model(model, EngineConfig())
    assert not should_repeat(model)
    monkeypatch.setattr(repeated_layers, "_MIN_LAYER_BYTES", 1000)
    assert should_repeat(model)
    repeat_layers(model)
    assert should_repeat(model)
    unroll_layers(model)
    assert not any("forward" in vars(each) for each in model.modules())


def test_weights_count_for_the_size_of_a_layer_however_they_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(dtype=torch.bfloat16, hidden_size=128, intermediate_size=128)
    layers = model.model.layers
    num_bytes = sum(weights.nbytes for weights in layers.parameters())
    monkeypatch.setattr(repeated_layers, "_MIN_LAYER_BYTES", num_bytes // len(layers))
    prepare_model(model, EngineConfig(exact=True))
    assert should_repeat(model)


def test_layers_that_are_called_otherwise_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_layers, "_MIN_LAYER_BYTES", 1000)
    model = make_model()
    prepare_model(model, EngineConfig())
    first = model.model.layers[0]
    first.forward = own = first.forward
    assert not should_repeat(model)
    unroll_layers(model)
    assert vars(first)["forward"] is own


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - {"gpt_oss"}))
def test_every_architecture_compiles(architecture: str, dtype: torch.dtype) -> None:
    """And gives the same, with grouped heads, windows of attention, and whatever else its layers
    do, but experts that are called one by one, as the numbers say.  By the kernels forwards are
    exact at any number of rows."""
    loaded = prepare_model(make_model(architecture, dtype), EngineConfig())
    compiled = compile_model(loaded)
    if compiled.is_native:
        runner = ModelRunner(loaded, KVCache(loaded.kv_shape, 2048, dtype, loaded.device))
        runner.compile_with(compiled)
        assert choose_shapes(runner, 17, exact=True) == Shapes(is_exact=True)


class Refusing(torch.nn.Module):
    """A module no compiler takes."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        print(value.tolist())
        return value


class Different(torch.nn.Module):
    """A module that gives something else when it is compiled."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value if torch.compiler.is_compiling() else value


@needs_compiler
@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (Refusing, "LlamaForCausalLM cannot be compiled"),
        (Different, "gives different results compiled"),
    ],
)
def test_a_model_that_is_not_itself_when_compiled_is_refused(
    norm: type[torch.nn.Module], reason: str
) -> None:
    """By its name, and before anybody is answered by it."""
    model = make_model(num_hidden_layers=1)
    model.model.norm = norm()
    with pytest.raises(UnsupportedModel, match=reason):
        compile_model(prepare_model(model, EngineConfig()))

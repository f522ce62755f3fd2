"""Forwards as a GPU runs them, on a CPU: of a few shapes, with all rows attending in one call."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from hdserve.config import EngineConfig
from hdserve.core import FinishReason, SamplingParams, Source
from hdserve.databases.recycled import NUM_TOP
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.build import _prepare
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.forward.static_batches import CAPTURE_SHAPES, StaticBatches
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kernels.draw import NO_TOKEN
from hdserve.engine.kernels.rows import WORD_BITS
from hdserve.engine.kernels.splits import MAX_DEPTH
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import Segment
from hdserve.engine.linear.gpu_skinny import use_gpu_skinny_linear
from hdserve.engine.loading.loader import prepare_model
from hdserve.engine.sampling.gpu_choices import FoundTokens
from hdserve.engine.sampling.sampler import choose
from hdserve.errors import ConfigError
from hdserve.tree import DraftTree
from tests.drafters import OracleDrafter
from tests.engine.caches import make_cache
from tests.engine.helpers import SMALL
from tests.engines import make_engine, make_prompt, make_sequence, plain_tokens, run
from tests.models import make_model

pytestmark = pytest.mark.usefixtures("untraced_attention")


def make_runner(architecture: str, dtype: torch.dtype, *, attends_in_one_call: bool) -> ModelRunner:
    loaded = prepare_model(make_model(architecture, dtype), EngineConfig())
    cache = KVCache(loaded.kv_shape, 640, loaded.dtype, loaded.device)
    return ModelRunner(loaded, cache, attends_in_one_call=attends_in_one_call)


def test_batches_of_as_many_rows_lie_in_the_same_place() -> None:
    """A graph reads what was written there since."""
    runner = make_runner("llama", torch.float32, attends_in_one_call=True)
    batches = StaticBatches(runner.cache, 4, Workers(), num_heads=4)
    tree = DraftTree(5, 4)
    tree.add_path([6, 7], Source.OTHER)
    first = batches.build([Chunk(Segment(0, 32), 3, [5], tree)])
    assert first.kind == (4, 4, False)
    first.send()
    assert first.token_ids.tolist() == [5, 6, 7, 0]
    second = batches.build([Chunk(Segment(32, 32), 4, [8], DraftTree(8, 0))] * 3)
    assert second.plan is first.plan
    assert second.kind == first.kind
    second.send()
    assert first.token_ids.tolist() == [8, 8, 8, 0]
    assert second.packed.logit_slices == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert len(second.logit_rows) == 4
    within = batches.build([Chunk(Segment(0, 32), 0, [1, 2, 3], None)])
    assert within.kind == (4, 1, False)
    assert len(within.logit_rows) == 1
    assert within.packed.num_nodes == 0
    large = DraftTree(5, WORD_BITS + 1)
    large.add_path([1] * (WORD_BITS + 1), Source.OTHER)
    assert not batches.fits([Chunk(Segment(0, 32), 3, [5], large)])
    assert batches.fits([Chunk(Segment(0, 32), 3, [5], tree)])


@pytest.mark.parametrize(
    ("num_sequences", "num_drafts", "num_prompt_tokens", "kind", "num_logits"),
    [
        (1, 31, 0, (32, 32, True), 32),
        (8, 31, 0, (256, 256, True), 256),
        (9, 31, 0, None, 512),
        (1, 0, 200, (256, 1, False), 1),
        (2, 31, 200, (512, 256, False), 256),
        (40, 0, 256, (512, 256, False), 256),
        (16, 31, 256, None, 512),
        (33, 0, 4096, None, 64),
    ],
)
def test_kinds(
    num_sequences: int,
    num_drafts: int,
    num_prompt_tokens: int,
    kind: tuple[int, int, bool] | None,
    num_logits: int,
) -> None:
    """Of drafting sequences and a prompt: each that has a graph is there before the first request,
    and none has many more logits than it needs."""
    cache = make_cache(8192)
    batches = StaticBatches(cache, 31, Workers(), num_heads=1)
    batches._tree_attention = cast("Any", len)  # called by no one here
    tree = DraftTree(5, num_drafts)
    for token_id in range(num_drafts):
        tree.add_node(0, token_id, Source.OTHER)
    segment = Segment(0, 8192)
    chunks = [Chunk(segment, 40, [5], tree)] * num_sequences
    if num_prompt_tokens:
        chunks.append(Chunk(segment, 0, [1] * num_prompt_tokens, None))
    batch = batches.build(chunks)
    assert batch.kind == kind
    assert len(batch.logit_rows) == num_logits
    if kind is not None:
        assert kind in {each.kind for each in batches.empty(kind[0])}


def test_trees_that_are_too_deep_attend_by_blocks() -> None:
    cache = make_cache()
    batches = StaticBatches(cache, 62, Workers(), num_heads=1)
    batches._tree_attention = cast("Any", len)
    for depth in (MAX_DEPTH, MAX_DEPTH + 1):
        tree = DraftTree(5, depth)
        tree.add_path([1] * depth, Source.OTHER)
        batch = batches.build([Chunk(Segment(0, 128), 3, [5], tree)])
        assert batch.kind == (64, 64, depth == MAX_DEPTH)
    batches.disable_tree_kernel()
    assert batches.build([Chunk(Segment(0, 128), 3, [5], DraftTree(5, 0))]).kind == (1, 1, False)


def test_numbers_of_rows_are_few() -> None:
    """Each is compiled for, and has a graph."""
    assert {CAPTURE_SHAPES.pad_rows(number) for number in range(1, 300)} == {
        1, 2, 4, 8, 16, 32, 64, 128, 256, 512,
    }  # fmt: skip


def test_a_runner_pads_to_them_whatever_its_shapes_are() -> None:
    """A model that was compiled by itself has others."""
    runner = make_runner("llama", torch.float32, attends_in_one_call=True)
    runner.shapes = Shapes(row_counts=(48,))
    segment = runner.cache.rows.allocate(64)
    assert segment is not None
    for length in (3, 5, 6, 7):
        runner.forward([Chunk(segment, 0, make_prompt(length), None)])
    assert runner._static is not None
    assert {num_rows for num_rows, _ in runner._static._inputs} == {4, 8}


def test_a_prompt_fills_the_forwards_of_those_that_decode() -> None:
    """A chunk as long as configured would be one row too many, and padded to twice as many."""
    engine = make_engine(
        attends_in_one_call=True, exact=False, prefill_chunk_tokens=16, prefill_slowdown=None
    )
    decoding, prompt = make_sequence("a", make_prompt(4)), make_sequence("b", make_prompt(100))
    engine.add(decoding)
    engine.step()
    engine.add(prompt)
    seen: list[int] = []

    def note(_module: torch.nn.Module, _inputs: Any, options: dict[str, Any]) -> None:
        seen.append(options["input_ids"].shape[1])

    engine._runner.model.module.register_forward_pre_hook(note, with_kwargs=True)
    while not prompt.num_output_tokens:
        engine.step()
    assert seen == [16] * 7
    assert decoding.num_output_tokens == 8


def test_only_static_batches_are_padded_for_all() -> None:
    """Exact forwards have other sizes, and elsewhere there are any."""
    runner = make_runner("llama", torch.float32, attends_in_one_call=True)
    assert runner.static_shapes == CAPTURE_SHAPES
    runner.shapes = Shapes(row_counts=(48,), is_exact=True)
    assert runner.static_shapes == Shapes()
    assert make_runner("llama", torch.float32, attends_in_one_call=False).static_shapes == Shapes()


def test_large_forwards_warm_up_without_all_their_logits() -> None:
    """Which may not fit beside the KV cache, and are of no use: no graph is made of them.  Others
    warm up with all their logits, and with few, as those of prompts have."""
    runner = make_runner("llama", torch.float32, attends_in_one_call=True)
    seen: list[int] = []

    def note(_head: torch.nn.Module, _rows: Any, logits: torch.Tensor) -> None:
        seen.append(logits.shape[1])

    handle = runner.model.module.get_output_embeddings().register_forward_hook(note)
    runner.warm_up(600)
    handle.remove()
    assert seen == [
        *(1, 1, 2, 1, 4, 1, 8, 1, 16, 1, 32),
        *(1, 32, 64, 1, 32, 128, 1, 32, 256, 1, 32, 256, 1, 32, 256),
    ]
    assert runner.attends_in_one_call


def test_attention_is_compiled_however_often_it_was_before() -> None:
    """By earlier engines of the process: PyTorch leaves a function that was compiled often as it
    is, which for attention takes as much memory as rows and cache multiplied."""
    runner = make_runner("llama", torch.float32, attends_in_one_call=True)
    limits = set()

    def note(*_: Any) -> None:
        limits.add(torch._dynamo.config.accumulated_recompile_limit)

    handle = runner.model.module.register_forward_pre_hook(note)
    runner.warm_up(64)
    handle.remove()
    assert min(limits) >= 1 << 20


def warm_up_until(error: Exception) -> ModelRunner:
    """At 64 rows of 600 it is raised."""
    runner = make_runner("llama", torch.float32, attends_in_one_call=True)

    def fail(_module: torch.nn.Module, _inputs: Any, options: dict[str, Any]) -> None:
        if options["input_ids"].shape[1] == 64:
            raise error

    handle = runner.model.module.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        runner.warm_up(600)
    finally:
        handle.remove()
    return runner


def test_what_cannot_be_compiled_is_done_without() -> None:
    """Whatever a compiler raises."""
    assert not warm_up_until(RuntimeError("no code for this GPU")).attends_in_one_call


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Ours, among what PyTorch logs."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("hdserve.") and record.levelname == "WARNING"
    ]


def test_products_that_fail_are_left_to_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    """Attention, which is not to blame, stays as fast as it was."""
    runner = make_runner("llama", torch.float64, attends_in_one_call=True)
    use_gpu_skinny_linear(runner.model.module)
    assert runner._static is not None

    def fail(*_: Any) -> list[torch.Tensor]:
        raise RuntimeError("no code for this GPU")

    runner._static._multiply_rows = fail
    runner.warm_up(64)
    assert runner.attends_in_one_call
    (warning,) = warnings_in(caplog)
    assert "products of few rows are disabled" in warning
    assert "no code for this GPU" in warning


def test_what_is_left_after_wrong_results_is_warmed_up(caplog: pytest.LogCaptureFixture) -> None:
    """Its graphs were made with the kernel that is given up; requests do not wait for others."""
    runner = make_runner("llama", torch.float64, attends_in_one_call=True)
    assert runner._static is not None

    def attend_to_nothing(
        _rows: Any, _items: Any, _number: Any, query: torch.Tensor, *others: Any
    ) -> torch.Tensor:
        size = 1, query.shape[2], query.shape[1], others[1].shape[-1]
        return query.new_zeros(size)

    runner._static._tree_attention = cast("Any", attend_to_nothing)
    seen: list[tuple[int, bool]] = []

    def note(_module: torch.nn.Module, _inputs: Any, options: dict[str, Any]) -> None:
        static = runner._static
        if "input_ids" in options and static is not None:  # not as transformers runs it alone
            seen.append((options["input_ids"].shape[1], static.has_tree_kernel))

    handle = runner.model.module.register_forward_pre_hook(note, with_kwargs=True)
    _prepare(runner, None, 64, exact=False)
    handle.remove()
    (warning,) = warnings_in(caplog)
    assert "the tree attention kernel is disabled" in warning
    assert runner.attends_in_one_call
    assert {1, 2, 4, 8, 16, 32, 64} <= {num_rows for num_rows, has_kernel in seen if has_kernel}
    assert {1, 2, 4, 8, 16, 32, 64} <= {num_rows for num_rows, has_kernel in seen if not has_kernel}


def test_forwards_that_do_not_fit_are_a_user_error() -> None:
    """Sequences that attend one by one would be served slowly, and would not fit either."""
    with pytest.raises(ConfigError, match=r"a forward of 600 rows .* lower kv_cache_tokens"):
        warm_up_until(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9, "top_k": 20}, {"logprobs": 2}],
    ids=str,
)
def test_drafts_change_nothing(params: dict[str, object]) -> None:
    """Several sequences, some with another seed and other parameters, drafted for rightly and
    wrongly; equal to what each gives alone, decoded plainly as a CPU does."""
    model = make_model()
    sequences = [
        make_sequence(name, make_prompt(12 + number, number), **{"seed": number, **params})
        for number, name in enumerate("abc")
    ]
    sequences.append(make_sequence("d", make_prompt(9, 9), temperature=0.7, seed=4))
    wanted = plain_tokens(model, sequences)
    drafter = OracleDrafter(wanted)
    engine = make_engine([drafter], model=model, attends_in_one_call=True, **SMALL)
    run(engine, sequences)
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted
    assert engine.stats.drafts.num_accepted_tokens > 0


class FoundByPyTorch:
    """Finds the tokens of a forward when it ends."""

    def __init__(self) -> None:
        self.num_drawn = 0
        self._found = FoundTokens((np.empty(0), np.empty(0)), np.empty(0))

    def send(self, logits: torch.Tensor, races: torch.Tensor) -> None:
        values, columns = logits.topk(NUM_TOP)
        drawn = torch.full((len(logits),), NO_TOKEN)
        factors = races[1].view(torch.float64).tolist()
        for row, (key, factor) in enumerate(zip(races[0].tolist(), factors, strict=True)):
            if factor:
                self.num_drawn += 1
                params = SamplingParams(temperature=1.0 / factor)
                drawn[row] = choose(logits[row : row + 1], params, [key])
        self._found = FoundTokens((columns.numpy(), values.numpy()), drawn.numpy())

    def read(self, num_rows: int, num_read: int) -> FoundTokens:
        (columns, values), drawn = self._found
        assert num_rows == len(drawn)
        return FoundTokens((columns[:num_read], values[:num_read]), drawn[:num_read])


@pytest.mark.parametrize(
    ("params", "is_drawn"),
    [
        ({"temperature": 0.6, "logprobs": 2}, True),
        ({"presence_penalty": 0.5}, False),
    ],
    ids=str,
)
def test_forwards_draw_what_is_sampled_freely(params: dict[str, Any], is_drawn: bool) -> None:
    """Beside sequences that are not, and with drafts; equal to what each gives alone."""
    model = make_model()
    sequences = [
        make_sequence(name, make_prompt(12 + number, number), **{"seed": number, **params})
        for number, name in enumerate("abc")
    ]
    sequences.append(make_sequence("d", make_prompt(9, 9), temperature=0.7, top_k=30, seed=4))
    sequences.append(make_sequence("e", make_prompt(9, 8), temperature=0.0))
    wanted = plain_tokens(model, sequences)
    drafter = OracleDrafter(wanted)
    engine = make_engine([drafter], model=model, attends_in_one_call=True, **SMALL)
    choices = engine._runner._choices = FoundByPyTorch()
    run(engine, sequences)
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted
    assert engine.stats.drafts.num_accepted_tokens > 0
    assert (choices.num_drawn > 0) == is_drawn


def test_what_a_forward_has_drawn_is_not_drawn_again() -> None:
    class Always(FoundByPyTorch):
        def read(self, num_rows: int, num_read: int) -> FoundTokens:
            found = super().read(num_rows, num_read)
            return found._replace(drawn=np.full_like(found.drawn, 7))

    engine = make_engine(attends_in_one_call=True, **SMALL)
    engine._runner._choices = Always()
    seq = make_sequence("a", make_prompt(12), max_tokens=5)
    run(engine, [seq])
    assert seq.token_ids[12:] == [7] * 5


def test_a_forward_that_can_draw_no_token_ends_its_sequence_alone() -> None:
    class Never(FoundByPyTorch):
        def read(self, num_rows: int, num_read: int) -> FoundTokens:
            found = super().read(num_rows, num_read)
            return found._replace(drawn=np.full_like(found.drawn, NO_TOKEN))

    engine = make_engine(attends_in_one_call=True, **SMALL)
    engine._runner._choices = Never()
    drawn, greedy = (
        make_sequence(name, make_prompt(12), temperature=temperature)
        for name, temperature in (("a", 1.0), ("b", 0.0))
    )
    run(engine, [drawn, greedy])
    assert drawn.finish_reason is FinishReason.ERROR
    assert greedy.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("attends_in_one_call", [True, False])
def test_drafts_hang_on_a_prompt_where_it_rounds_alike(attends_in_one_call: bool) -> None:
    """Not on a GPU, where drafts would come out otherwise than decoded alone; they do once the
    prompt is read."""
    model = make_model()
    seq = make_sequence("a", make_prompt(12))
    drafter = OracleDrafter(plain_tokens(model, [seq]))
    engine = make_engine([drafter], model=model, attends_in_one_call=attends_in_one_call, **SMALL)
    engine.add(seq)
    engine.step()
    assert (engine.stats.drafts.num_draft_tokens == 0) == attends_in_one_call
    engine.step()
    assert engine.stats.drafts.num_accepted_tokens > 0

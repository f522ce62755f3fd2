"""Drafts change speed, never tokens: drafted output equals plain output, token for token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch

from hdserve import core
from hdserve.core import SpeculationParams, TokenLogprob
from hdserve.drafting.base import Drafter
from hdserve.engine.batch.shapes import exact_candidates
from tests.drafters import ForeignTokenDrafter, JunkDrafter, OracleDrafter, RaisingDrafter
from tests.engines import make_engine, make_prompt, make_sequence, plain_tokens, run
from tests.models import ARCHITECTURES, VOCAB_SIZE, make_model
from tests.sampling import SAMPLING

Futures = dict[str, list[int]]

DRAFTERS: dict[str, Callable[[Futures], list[Drafter]]] = {
    "oracle": lambda futures: [OracleDrafter(futures)],
    "junk": lambda futures: [JunkDrafter(VOCAB_SIZE)],
    "raising": lambda futures: [RaisingDrafter()],
    "foreign": lambda futures: [ForeignTokenDrafter(VOCAB_SIZE)],
    "oracle after raising": lambda futures: [RaisingDrafter(), OracleDrafter(futures)],
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_generate(architecture: str) -> None:
    """Every architecture gives what transformers' own ``generate`` gives, with drafts accepted."""
    model = make_model(architecture)
    prompt = make_prompt(41)
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    wanted = model.generate(ids, max_new_tokens=40, **options)[0].tolist()
    for drafters in ([], [OracleDrafter({"a": wanted})], [JunkDrafter(VOCAB_SIZE)]):
        seq = make_sequence("a", prompt, temperature=0.0, max_tokens=40)
        run(make_engine(drafters, model=model), [seq])
        assert seq.token_ids == wanted
        if drafters and drafters[0].name == "oracle":
            assert seq.counts.num_accepted_tokens > 20


def _sequences(setting: str) -> list[core.Sequence]:
    return [
        make_sequence(f"{seed}", make_prompt(5 + 17 * seed, seed), seed=seed, **SAMPLING[setting])
        for seed in range(3)
    ]


@cache
def _plain_tokens(setting: str) -> Futures:
    """Which are the same beside all drafters."""
    return plain_tokens(make_model(), _sequences(setting))


@pytest.mark.parametrize("setting", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_equals_plain(drafter: str, setting: str) -> None:
    """Every parameter, three seeds in one batch of unequal lengths: equal to each alone, plain."""
    sequences, wanted = _sequences(setting), _plain_tokens(setting)
    engine = make_engine(DRAFTERS[drafter](wanted))
    run(engine, sequences)
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted
    if "oracle" in drafter:
        assert sum(seq.counts.num_accepted_tokens for seq in sequences) > 10
    if drafter not in ("raising", "foreign"):
        assert all(seq.counts.num_drafts for seq in sequences)
    assert bool(engine.stats.num_drafter_failures) is (drafter not in ("oracle", "junk"))
    assert len({tuple(tokens[-8:]) for tokens in wanted.values()}) == 3


def test_logprobs_equal_plain() -> None:
    """Log probabilities come from the same rows with drafts and without."""
    model = make_model()
    options: dict[str, Any] = {"temperature": 0.8, "logprobs": 3, "seed": 5}
    plain = run(make_engine(model=model), [make_sequence("a", make_prompt(9), **options)])
    wanted = [item for output in plain for item in output.logprobs or ()]
    future = plain[0].sequence.token_ids
    drafted = run(
        make_engine([OracleDrafter({"a": future})], model=model),
        [make_sequence("a", make_prompt(9), **options)],
    )
    found = [item for output in drafted for item in output.logprobs or ()]
    assert len(drafted) < len(plain)
    assert [item.token_id for item in found] == [item.token_id for item in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert len(one.top) == 3


@pytest.mark.parametrize("setting", ["logprobs", "everything"])
def test_exact_answers_have_the_bits_of_plain_ones(setting: str) -> None:
    """In float32, where rows may be rounded otherwise beside others.  All sizes of the model are
    whole vectors of any processor, so that it can be exact with any number of rows."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    model = make_model(dtype=torch.float32, **sizes)

    def answers(
        drafters: Iterable[Drafter] = (), **options: int
    ) -> tuple[Futures, dict[str, list[TokenLogprob]]]:
        engine = make_engine(drafters, model=model, exact=True, **options)
        assert engine.is_exact
        sequences = _sequences(setting)
        logprobs: dict[str, list[TokenLogprob]] = {seq.request_id: [] for seq in sequences}
        for output in run(engine, sequences):
            logprobs[output.sequence.request_id] += output.logprobs or ()
        return {seq.request_id: seq.token_ids for seq in sequences}, logprobs

    plain = answers(max_num_sequences=1)
    assert all(plain[1].values())
    for drafter in ("oracle", "junk"):
        assert answers(DRAFTERS[drafter](plain[0])) == plain


def test_padded_forwards_change_nothing() -> None:
    """Forwards of the numbers of rows at which models may be exact without our kernels."""
    sequences, wanted = _sequences("temperature"), _plain_tokens("temperature")
    engine = make_engine([OracleDrafter(wanted)])
    engine._runner.shapes = exact_candidates(64)
    run(engine, sequences)
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted
    assert sum(seq.counts.num_accepted_tokens for seq in sequences) > 10


def test_joins_and_aborts_change_nothing() -> None:
    """Sequences that come and go in mid-flight leave the others' tokens alone."""
    model = make_model()
    sequences = [
        make_sequence(f"{seed}", make_prompt(7 + 23 * (seed % 4), seed), seed=seed, temperature=0.9)
        for seed in range(9)
    ]
    wanted = plain_tokens(model, sequences)
    engine = make_engine([OracleDrafter(wanted, length=2)], model=model, max_num_sequences=3)
    arriving = iter(sequences)
    aborted = {"2", "5"}
    for step in range(400):
        if step % 2 == 0 and (seq := next(arriving, None)) is not None:
            engine.add(seq)
        if step in {6, 14}:
            engine.abort("2" if step == 6 else "5")
        engine.step()
    assert not engine.has_work
    for seq in sequences:
        if seq.request_id in aborted:
            assert wanted[seq.request_id][: len(seq.token_ids)] == seq.token_ids
        else:
            assert seq.token_ids == wanted[seq.request_id]
    assert engine.stats.kv_cache_usage == 0.0
    assert engine.stats.num_finished["abort"] >= 1


@pytest.mark.parametrize("chunk", [1, 7, 16, 200])
def test_prefill_chunks_change_nothing(chunk: int) -> None:
    """A prompt may be cut anywhere."""
    model = make_model("mistral")
    sequences = [make_sequence(str(n), make_prompt(n, n), temperature=0.7) for n in (150, 3)]
    wanted = plain_tokens(model, sequences)
    engine = make_engine([OracleDrafter(wanted)], model=model, prefill_chunk_tokens=chunk)
    run(engine, sequences)
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted


def test_choices_differ_and_repeat() -> None:
    """Choices of one request have noise of their own; the same request gives the same answers."""

    def answers() -> list[list[int]]:
        sequences = [
            core.Sequence(
                f"r/{index}",
                make_prompt(6),
                core.SamplingParams(max_tokens=16, seed=3),
                choice_index=index,
            )
            for index in range(4)
        ]
        run(make_engine([JunkDrafter(VOCAB_SIZE)]), sequences)
        return [seq.output_token_ids for seq in sequences]

    first = answers()
    assert first == answers()
    assert len({tuple(tokens) for tokens in first}) == 4


def test_speculation_can_be_switched_off() -> None:
    """A request without speculation is decoded plainly beside one with."""
    model = make_model()
    options: dict[str, Any] = {"temperature": 0.0}
    sequences = [
        make_sequence("on", make_prompt(8), **options),
        make_sequence("off", make_prompt(8), SpeculationParams(is_enabled=False), **options),
        make_sequence("few", make_prompt(8), SpeculationParams(max_draft_tokens=2), **options),
    ]
    wanted = plain_tokens(model, sequences)
    run(make_engine([OracleDrafter(wanted)], model=model), sequences)
    assert len({tuple(seq.token_ids) for seq in sequences}) == 1
    assert sequences[0].counts.num_accepted_tokens > 0
    assert sequences[1].counts.num_drafts == 0
    few = sequences[2].counts
    assert 0 < few.num_draft_tokens <= 2 * few.num_drafts


def _mutations() -> Iterator[tuple[str, str, str, Callable[..., Any]]]:
    """Deliberate faults: module, name, and what replaces it."""
    import numpy as np

    from hdserve.engine import decoder, engine
    from hdserve.engine.batch import packed_rows, step_plan

    def siblings_visible(chunk: step_plan.Chunk, num_keys: int) -> Any:
        visible = original_visible(chunk, num_keys)
        end = chunk.first_column + chunk.num_rows
        visible[:, chunk.first_column : end] |= np.tri(chunk.num_rows, dtype=bool)
        return visible

    def wrong_positions(chunks: Any, depths: Any, *arrays: Any) -> None:
        original_rows(chunks, np.arange(1, len(depths) + 1), *arrays)

    original_visible, original_rows = step_plan._visible, packed_rows.lay_out_rows
    yield "sibling visible", "hdserve.engine.batch.step_plan", "_visible", siblings_visible
    yield "wrong position", "hdserve.engine.batch.packed_rows", "lay_out_rows", wrong_positions
    yield "wrong kept rows", "hdserve.engine.engine", "_moves", lambda slot, acceptance: iter(())

    def noise_by_node(self: Any, outputs: Any) -> Callable[[int], int]:
        positions = count(len(self.seq.token_ids))

        def choose(node: int) -> int:
            logits = outputs.logits[node : node + 1].float()
            return self._choose(logits, next(positions) + (node > 0))

        return choose

    yield "noise by node", "hdserve.engine.decoder", "SequenceDecoder._chooser", noise_by_node
    original_decide = decoder.SequenceDecoder.decide

    def wrong_row(self: Any, tree: Any, outputs: Any, *chosen: Any) -> Any:
        shifted = outputs._replace(of_forward=outputs.of_forward.roll(1, dims=0))
        return original_decide(self, tree, shifted, *chosen)

    yield "wrong logits row", "hdserve.engine.decoder", "SequenceDecoder.decide", wrong_row
    assert engine


@pytest.mark.parametrize("fault", ["none", *(name for name, *_ in _mutations())])
def test_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite above can fail: each deliberate fault of the engine changes tokens."""
    model = make_model()
    sequences = [
        make_sequence(str(seed), make_prompt(12, seed), seed=seed, temperature=1.0, max_tokens=40)
        for seed in range(3)
    ]
    wanted = plain_tokens(model, sequences)
    engine = make_engine([OracleDrafter(wanted)], model=model)
    for name, module, attribute, replacement in _mutations():
        if name == fault:
            monkeypatch.setattr(f"{module}.{attribute}", replacement)
    run(engine, sequences)
    found = {seq.request_id: seq.token_ids for seq in sequences}
    assert (found == wanted) == (fault == "none")

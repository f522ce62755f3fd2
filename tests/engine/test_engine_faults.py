"""Rows that hold no numbers, and sequences that fail: nobody else is harmed."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from hdserve import core
from hdserve.core import FinishReason, Source
from hdserve.drafting.base import Drafter
from hdserve.errors import HdserveError
from hdserve.tree import DraftTree
from tests.drafters import OracleDrafter
from tests.engine.helpers import GREEDY, SMALL, TOKENIZER, plain
from tests.engines import make_engine, make_prompt, make_sequence, run
from tests.models import make_model

pytestmark = pytest.mark.usefixtures("untraced_attention")


@pytest.mark.parametrize("exact", [False, True])
def test_an_overflow_harms_nobody_else(exact: bool) -> None:
    """In float16 a sequence whose numbers overflow ends somehow, with an error where its last token
    makes them; neither those beside it nor those that get its rows of the cache later are
    harmed."""
    model = make_model(dtype=torch.float16)
    poison = 7
    clean = [token for token in make_prompt(20) if token != poison]
    params: dict[str, Any] = {"logit_bias": {poison: -100.0}, "max_tokens": 8}
    wanted = make_sequence("a", clean, **params)
    run(make_engine(model=model), [wanted])
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("inf")
    engine = make_engine(model=model, exact=exact, kv_cache_tokens=96, max_num_sequences=2)
    prompts = [clean, [poison, *clean], clean, [*clean, poison], clean]
    sequences = [make_sequence(str(n), prompt, **params) for n, prompt in enumerate(prompts)]
    run(engine, sequences)
    reasons = [seq.finish_reason for seq in sequences]
    assert reasons.pop(3) is FinishReason.ERROR
    assert {*reasons} == {FinishReason.LENGTH}
    assert all(seq.token_ids == wanted.token_ids for seq in sequences[::2])


@pytest.mark.parametrize(
    "options", [{}, GREEDY, {"logprobs": 1}, {**GREEDY, "min_tokens": 2}], ids=str
)
def test_a_token_is_never_chosen_by_what_is_no_number(options: dict[str, Any]) -> None:
    """A sequence whose logits overflow ends with an error, whatever it would have been given; the
    one beside it does not."""
    model, poison = make_model(), 7
    clean = [token for token in make_prompt(20) if token != poison]
    biased = {} if options == GREEDY else {"logit_bias": {poison: -100.0}}
    params: dict[str, Any] = {**options, **biased, "max_tokens": 8}
    wanted = plain(clean, **params)
    assert poison not in wanted.output_token_ids
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    good = make_sequence("good", clean, **params)
    bad = make_sequence("bad", [*clean, poison], **params)
    outputs = run(make_engine(model=model), [bad, good])
    assert good.token_ids == wanted.token_ids
    (output,) = (output for output in outputs if output.sequence is bad)
    assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, ())
    assert isinstance(output.error, HdserveError)


class PoisonDrafter(Drafter):
    """Drafts one token."""

    name = "poison"

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        tree.add_path([self._token_id], Source.OTHER)


@pytest.mark.parametrize("attends_in_one_call", [False, True])
@pytest.mark.parametrize(
    "options", [{}, GREEDY, {"logprobs": 1}, {**GREEDY, "min_tokens": 2}], ids=str
)
def test_drafts_that_the_model_makes_no_numbers_of_change_nothing(
    options: dict[str, Any], attends_in_one_call: bool
) -> None:
    """Neither of the request nor of those beside it."""
    model, poison = make_model(), 5
    clean = [[token for token in make_prompt(size) if token != poison] for size in (20, 1, 40)]
    params: dict[str, Any] = {**options, "max_tokens": 8}
    wanted = [plain(prompt, **params).token_ids for prompt in clean]
    assert not any(poison in token_ids for token_ids in wanted)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = make_engine(
        [PoisonDrafter(poison)], model=model, attends_in_one_call=attends_in_one_call, **SMALL
    )
    assert engine._runner.attends_in_one_call is attends_in_one_call
    sequences = [make_sequence(str(n), prompt, **params) for n, prompt in enumerate(clean)]
    run(engine, sequences)
    assert [seq.token_ids for seq in sequences] == wanted
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in sequences)
    assert engine.stats.num_prompt_tokens == sum(map(len, clean))  # what is tried again, once


def test_such_drafts_change_no_long_prompt_beside_them() -> None:
    """Where all rows attend together, the rows of others are hidden from each, not absent."""
    model, poison = make_model(), 7
    clean = [[token for token in make_prompt(size) if token != poison] for size in (1, 100)]
    params: dict[str, Any] = {**GREEDY, "max_tokens": 20}
    wanted = [plain(prompt, **params).token_ids for prompt in clean]
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = make_engine([PoisonDrafter(poison)], model=model, attends_in_one_call=True, **SMALL)
    assert engine._runner.attends_in_one_call
    sequences = [make_sequence(str(n), prompt, **params) for n, prompt in enumerate(clean)]
    run(engine, sequences)
    assert [seq.token_ids for seq in sequences] == wanted


@pytest.mark.parametrize(("exact", "poison"), [(False, 7), ("auto", 13)])
def test_what_is_tried_at_the_start_leaves_no_such_rows(
    exact: bool | Literal["auto"], poison: int
) -> None:
    """Trees and contexts that hold a token of which the model makes no numbers go through it before
    the first request."""
    model = make_model()
    clean = [token for token in make_prompt(20) if token != poison]
    wanted = plain(clean, **GREEDY, max_tokens=8)
    assert poison not in wanted.output_token_ids
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    good = make_sequence("good", clean, **GREEDY, max_tokens=8)
    run(make_engine(model=model, exact=exact, adapts_budget=True), [good])
    assert good.token_ids == wanted.token_ids


def test_rows_that_hold_no_numbers_reach_nobody_else() -> None:
    """A masked column counts for nothing, but nothing times what is no number is none."""
    model, poison = make_model(), 7
    clean = [token for token in make_prompt(20) if token != poison]
    wanted = plain(clean, **GREEDY, max_tokens=8)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = make_engine(model=model, kv_cache_tokens=64, max_num_sequences=1)
    for number in range(2):
        run(engine, [make_sequence(f"bad {number}", [poison] * 40, **GREEDY, max_tokens=8)])
    good = make_sequence("good", clean, **GREEDY, max_tokens=8)
    run(engine, [good])
    assert good.finish_reason is not FinishReason.ERROR
    assert good.token_ids == wanted.token_ids


@pytest.mark.parametrize(
    "options",
    [{"logprobs": 1.5}, {"stop": (("a",),)}, {"presence_penalty": 1.0, "logprobs": 1.5}],
    ids=["to choose", "to show", "with a history"],
)
@pytest.mark.parametrize("has_drafts", [False, True])
def test_what_fails_for_one_sequence_ends_it_alone(
    options: dict[str, Any], has_drafts: bool
) -> None:
    """A value nobody checked, which the decoder of one sequence fails on, ends that one with an
    error; those beside it, and those that get its rows of the cache, have the plain answers."""
    wanted = {number: plain(make_prompt(9, number), **GREEDY) for number in range(6)}
    futures = {str(number): seq.token_ids for number, seq in wanted.items()}
    futures |= {f"bad {name}": token_ids for name, token_ids in futures.items()}
    drafters = [OracleDrafter(futures)] if has_drafts else []
    engine = make_engine(drafters, tokenizer=TOKENIZER, kv_cache_tokens=96, max_num_sequences=2)
    good = [make_sequence(str(number), make_prompt(9, number), **GREEDY) for number in wanted]
    bad = [make_sequence(f"bad {number}", make_prompt(9, number), **GREEDY) for number in wanted]
    for seq in bad:
        for name, value in options.items():
            object.__setattr__(seq.params, name, value)
    outputs = run(engine, [seq for pair in zip(good, bad, strict=True) for seq in pair])
    for number, seq in enumerate(good):
        assert seq.token_ids == wanted[number].token_ids
    for seq in bad:
        ends = [output for output in outputs if output.sequence is seq and output.finish_reason]
        assert [end.finish_reason for end in ends] == [FinishReason.ERROR]
        assert isinstance(ends[0].error, HdserveError)
        told = [token for output in outputs if output.sequence is seq for token in output.token_ids]
        assert seq.output_token_ids == told
    assert engine.stats.num_finished == {"length": 6, "error": 6}
    assert engine.stats.kv_cache_usage == 0.0


@pytest.mark.parametrize("options", [{}, {"logprobs": 1}, {"temperature": 0.7}], ids=str)
@pytest.mark.parametrize("attends_in_one_call", [False, True])
@pytest.mark.parametrize("is_ending", [False, True])
def test_what_comes_behind_an_end_does_not_matter(
    is_ending: bool, attends_in_one_call: bool, options: dict[str, Any]
) -> None:
    """Drafts go on behind a token that ends the sequence, where the model may make no numbers; and
    where it does not end there, as many tokens are told as without drafts."""
    prompt, params = make_prompt(6), {**GREEDY, **options, "max_tokens": 16}
    tokens = plain(prompt, **params).token_ids
    last = next(n for n in range(len(prompt) + 2, len(tokens)) if tokens[n] not in tokens[:n])
    model = make_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[tokens[last]] = float("nan")
    stops = {"stop_token_ids": (tokens[last],)} if is_ending else {}
    drafter = OracleDrafter({"a": tokens})
    engine = make_engine([drafter], model=model, attends_in_one_call=attends_in_one_call, **SMALL)
    seq = make_sequence("a", prompt, **params, **stops)
    run(engine, [seq])
    assert seq.finish_reason is (FinishReason.STOP if is_ending else FinishReason.ERROR)
    assert seq.token_ids == tokens[: last + 1]
    assert bool(seq.counts.num_accepted_tokens) is attends_in_one_call  # else tried again, plainly


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_that_is_given_up_leaves_nothing_to_others(dtype: torch.dtype) -> None:
    """Its rows hold no numbers, and nobody has noticed."""
    model, poison = make_model(dtype=dtype), 7
    clean = [token for token in make_prompt(50, 3) if token != poison]
    params: dict[str, Any] = {**GREEDY, "max_tokens": 8}
    options: dict[str, Any] = {"kv_cache_tokens": 128, "max_num_sequences": 1}
    options |= {"prefill_chunk_tokens": 16, "prefix_caching": False}
    wanted = make_sequence("a", clean, **params)
    run(make_engine(model=model, **options), [wanted])
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = make_engine(model=model, **options)
    engine.add(make_sequence("bad", [poison] * 60, **params))
    for _ in range(2):
        engine.step()
    engine.abort("bad")
    good = make_sequence("good", clean, **params)
    run(engine, [good])
    assert good.token_ids == wanted.token_ids


class WidePoisonDrafter(PoisonDrafter):
    """Drafts it behind some others."""

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        for token_id in range(40, 50):
            tree.add_path([token_id], Source.OTHER)
        super().propose(seq, tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_draft_that_was_rejected_leaves_nothing_to_others(dtype: torch.dtype) -> None:
    """Where the kernel attends, nobody notices that its row holds no numbers; prompts attend by
    PyTorch, to whole blocks of rows."""
    model, poison = make_model(dtype=dtype, head_dim=16), 5
    short, long = (
        [token for token in make_prompt(*size) if token != poison] for size in ((6, 0), (40, 3))
    )
    params: dict[str, Any] = {**GREEDY, "max_tokens": 8}
    options: dict[str, Any] = {"kv_cache_tokens": 64, "max_num_sequences": 1}
    options |= {"prefill_chunk_tokens": 20, "prefix_caching": False}
    wanted = make_sequence("a", long, **params)
    run(make_engine(model=model, **options), [wanted])
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = make_engine([WidePoisonDrafter(poison)], model=model, **options)
    run(engine, [make_sequence("bad", short, **params)])
    good = make_sequence("good", long, core.SpeculationParams(is_enabled=False), **params)
    run(engine, [good])
    assert good.token_ids == wanted.token_ids

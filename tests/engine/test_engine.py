"""One engine step after another: ends, limits, errors, counters, and what drafters are told."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hdserve import core
from hdserve.config import DraftingConfig, EngineConfig, ModelConfig
from hdserve.core import FinishReason, SamplingParams, Source, SpeculationParams, StepOutput
from hdserve.drafting.base import Drafter, Forward
from hdserve.drafting.budget import BatchCost, DraftBudget, ForwardCost
from hdserve.engine.build import build_engine
from hdserve.engine.engine import Engine
from hdserve.engine.loader import prepare_model
from hdserve.engine.stats import add_counts
from hdserve.engine.tokenizer import Tokenizer, load_tokenizer
from hdserve.errors import ConfigError, HdserveError, InvalidRequest, PromptTooLong
from hdserve.tree import Acceptance, DraftTree
from tests.drafters import InterruptedDrafter, JunkDrafter, OracleDrafter, SlowLearner
from tests.engines import make_engine, make_prompt, make_sequence, run
from tests.models import MAX_POSITIONS, VOCAB_SIZE, make_model

TOKENIZER = load_tokenizer("hdserve-tiny")
GREEDY: dict[str, Any] = {"temperature": 0.0}


class RecordingDrafter(Drafter):
    """Notes what it is told, and drafts what it was given."""

    name = "recording"
    needs_hidden = True

    def __init__(self, futures: dict[str, list[int]]) -> None:
        self._oracle = OracleDrafter(futures)
        self.calls: list[tuple[str, str]] = []
        self.observed: list[tuple[DraftTree, Acceptance, list[int], Forward]] = []

    def start(self, seq: core.Sequence) -> None:
        assert seq.num_output_tokens == 0
        self.calls.append(("start", seq.request_id))

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        self.calls.append(("propose", seq.request_id))
        assert tree.token_ids == [seq.token_ids[-1]]
        assert 0 < tree.max_depth < seq.num_remaining_tokens, "drafts beyond the end are waste"
        self._oracle.propose(seq, tree)

    def observe(
        self,
        seq: core.Sequence,
        tree: DraftTree,
        acceptance: Acceptance,
        forward: Forward | None,
    ) -> None:
        assert forward is not None
        self.calls.append(("observe", seq.request_id))
        self.observed.append((tree, acceptance, list(seq.token_ids), forward))

    def finish(self, seq: core.Sequence) -> None:
        assert seq.finish_reason is not None
        self.calls.append(("finish", seq.request_id))


def make(drafters: Iterable[Drafter] = (), **options: Any) -> Engine:
    return make_engine(drafters, **{"exact": False, **options})


def model_with_eos(*token_ids: int) -> torch.nn.Module:
    model = make_model()
    model.generation_config.eos_token_id = list(token_ids)
    return model


def plain(prompt: list[int], **params: Any) -> core.Sequence:
    """What a request gives alone and without drafts."""
    seq = make_sequence("a", prompt, **params)
    run(make(), [seq])
    return seq


def futures_of(sequences: Iterable[core.Sequence]) -> dict[str, list[int]]:
    """The full token ids of each sequence, decoded alone and plainly."""
    found = {}
    for seq in sequences:
        alone = core.Sequence(seq.request_id, list(seq.token_ids), seq.params)
        run(make(), [alone])
        found[seq.request_id] = alone.token_ids
    return found


# --- ends ---


def test_max_tokens_is_exact_with_drafts() -> None:
    """A sequence ends at its limit even where more drafts were right, and says ``length``."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY, max_tokens=30).token_ids
    for max_tokens in (1, 2, 5, 6, 7):
        seq = make_sequence("a", prompt, **GREEDY, max_tokens=max_tokens)
        run(make([OracleDrafter({"a": future})]), [seq])
        assert seq.token_ids == future[: len(prompt) + max_tokens]
        assert seq.finish_reason is FinishReason.LENGTH


def test_numbers_of_numpy_are_numbers() -> None:
    """Drafters are given Python's, which know more."""
    seq = make_sequence("a", make_prompt(5), max_tokens=np.int64(7))
    make().add(seq)
    assert type(seq.max_total_tokens) is int


@pytest.mark.parametrize("has_drafts", [False, True])
def test_the_context_ends(has_drafts: bool) -> None:
    """Without ``max_tokens``, or with too many, the answer ends with the model's context."""
    prompt = make_prompt(20)
    future = plain(prompt, **GREEDY, max_tokens=40).token_ids
    for max_tokens in (None, 1000):
        seq = make_sequence("a", prompt, **GREEDY, max_tokens=max_tokens)
        drafters = [OracleDrafter({"a": future})] if has_drafts else []
        run(make(drafters, max_model_len=32), [seq])
        assert seq.token_ids == future[:32]
        assert seq.finish_reason is FinishReason.LENGTH


def test_the_whole_context_of_the_model_can_be_used() -> None:
    """The last position of the model is decoded at, with a tree that would reach beyond it."""
    seq = make_sequence("a", make_prompt(MAX_POSITIONS - 5), **GREEDY, max_tokens=None)
    run(make([JunkDrafter(VOCAB_SIZE)]), [seq])
    assert len(seq.token_ids) == MAX_POSITIONS
    seq = make_sequence("a", make_prompt(MAX_POSITIONS - 1), **GREEDY)
    run(make([JunkDrafter(VOCAB_SIZE)]), [seq])
    assert seq.num_output_tokens == 1


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("kind", ["eos", "second eos", "stop_token_ids"])
def test_ending_tokens(kind: str, has_drafts: bool) -> None:
    """Each end-of-sequence id of the model and each stop token ends the sequence; it is the last
    token, though not part of the text, and accepted drafts behind it are dropped."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY, max_tokens=30).token_ids
    at = next(n for n in range(len(prompt) + 3, 39) if future[n] not in future[len(prompt) : n])
    ending = future[at]
    options: dict[str, Any] = {"model": model_with_eos(0, ending), "tokenizer": TOKENIZER}
    params: dict[str, Any] = {}
    if kind == "eos":
        options["model"] = model_with_eos(ending)
    elif kind == "stop_token_ids":
        options["model"], params = make_model(), {"stop_token_ids": (ending,)}
    drafters = [OracleDrafter({"a": future}, length=11)] if has_drafts else []
    seq = make_sequence("a", prompt, **GREEDY, **params, max_tokens=30)
    outputs = run(make(drafters, **options), [seq])
    assert seq.token_ids == future[: at + 1]
    assert seq.finish_reason is FinishReason.STOP
    text = "".join(output.text for output in outputs)
    assert text == TOKENIZER.decode(future[len(prompt) : at], skips_special_tokens=True)


def test_ignore_eos() -> None:
    """With ``ignore_eos`` an end-of-sequence token is one like any other; a stop token still
    stops."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY, max_tokens=30).token_ids
    eos, stop = future[len(prompt) + 2], future[len(prompt) + 12]
    engine = make(model=model_with_eos(eos))
    seq = make_sequence("a", prompt, **GREEDY, ignore_eos=True, max_tokens=30)
    run(engine, [seq])
    assert seq.token_ids == future
    assert seq.finish_reason is FinishReason.LENGTH
    seq = make_sequence("b", prompt, **GREEDY, ignore_eos=True, stop_token_ids=(stop,))
    run(engine, [seq])
    assert seq.token_ids[-1] == stop
    assert seq.finish_reason is FinishReason.STOP


def test_min_tokens_delays_every_end() -> None:
    """Before ``min_tokens`` neither an end-of-sequence token is chosen nor a stop string heeded."""
    prompt = make_prompt(9)
    everything = tuple(chr(code) for code in range(33, 80))
    engine = make(model=model_with_eos(*range(3, 50)), tokenizer=TOKENIZER)
    seq = make_sequence("a", prompt, min_tokens=7, max_tokens=20)
    run(engine, [seq])
    assert seq.finish_reason is FinishReason.STOP
    assert not set(seq.output_token_ids[:7]) & set(range(3, 50))
    engine = make(tokenizer=TOKENIZER)
    seq = make_sequence("b", prompt, min_tokens=7, max_tokens=20, stop=everything)
    run(engine, [seq])
    assert seq.finish_reason is FinishReason.STOP
    assert seq.num_output_tokens >= 7


def test_min_tokens_counts_the_token_that_stops() -> None:
    """A stop string that the last of ``min_tokens`` tokens completes stops; one token earlier it
    does not."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY).output_token_ids
    at = next(n for n in range(4, 24) if future[n] not in future[:n])
    (stop,) = {TOKENIZER.token_text(future[at])}
    for min_tokens, stops in ((at + 1, True), (at + 2, False)):
        seq = make_sequence("a", prompt, **GREEDY, stop=(stop,), min_tokens=min_tokens)
        run(make(tokenizer=TOKENIZER), [seq])
        assert (seq.num_output_tokens == at + 1) is stops


def stop_in(text: str) -> str:
    """Three letters in the middle that come there first."""
    at = next(n for n in range(len(text) // 2, len(text)) if text.find(text[n : n + 3]) == n)
    return text[at : at + 3]


@pytest.mark.parametrize("includes", [False, True])
def test_stop_strings_across_accepted_drafts(includes: bool) -> None:
    """A stop string that accepted drafts complete in mid-step ends text and tokens exactly where
    plain decoding ends them."""
    prompt, params = make_prompt(9), {"temperature": 0.9, "max_tokens": 40}
    seq = make_sequence("a", prompt, **params)
    text = "".join(output.text for output in run(make(tokenizer=TOKENIZER), [seq]))
    future, stop = seq.token_ids, stop_in(text)
    found = []
    for drafters in ([], [OracleDrafter({"a": future}, length=11)]):
        seq = make_sequence(
            "a", prompt, **params, stop=(stop,), include_stop_str_in_output=includes
        )
        outputs = run(make(drafters, tokenizer=TOKENIZER), [seq])
        assert seq.finish_reason is FinishReason.STOP
        found.append(("".join(output.text for output in outputs), seq.token_ids, len(outputs)))
    (plain_text, plain_ids, num_plain), (drafted_text, drafted_ids, num_drafted) = found
    assert plain_text == text[: text.index(stop) + (len(stop) if includes else 0)]
    assert (drafted_text, drafted_ids) == (plain_text, plain_ids)
    assert num_drafted < num_plain


def test_held_text_comes_at_the_end() -> None:
    """The beginning of a stop string that never came is part of the last output."""
    prompt = make_prompt(9)
    seq = make_sequence("a", prompt, temperature=0.9)
    text = "".join(output.text for output in run(make(tokenizer=TOKENIZER), [seq]))
    seq = make_sequence("a", prompt, temperature=0.9, stop=(text[-2:] + "\x00",))
    outputs = run(make(tokenizer=TOKENIZER), [seq])
    assert "".join(output.text for output in outputs) == text
    assert outputs[-1].text.endswith(text[-2:])


def test_the_text_goes_on_after_the_prompt() -> None:
    """Prompt and output together are the text, also where a decoder drops the space that a text
    begins with."""
    words = {f"\u2581w{number}": number for number in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(WordLevel(words, unk_token="\u2581w0"))
    backend.decoder = Metaspace()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    seq = make_sequence("a", make_prompt(5), **GREEDY)
    text = "".join(output.text for output in run(make(tokenizer=tokenizer), [seq]))
    assert tokenizer.decode(make_prompt(5)) + text == tokenizer.decode(seq.token_ids)


# --- what is refused ---


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ([], {}, InvalidRequest, "prompt"),
        ([1] * MAX_POSITIONS, {}, PromptTooLong, "prompt"),
        ([1] * (MAX_POSITIONS + 50), {}, PromptTooLong, "prompt"),
        ([1, VOCAB_SIZE], {}, InvalidRequest, "prompt"),
        ([-1], {}, InvalidRequest, "prompt"),
        ([10**400], {}, InvalidRequest, "prompt"),
        ([1], {"stop_token_ids": (VOCAB_SIZE,)}, InvalidRequest, "stop_token_ids"),
        ([1], {"stop_token_ids": (-1,)}, InvalidRequest, "stop_token_ids"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, InvalidRequest, "logit_bias"),
        ([1], {"logit_bias": {-1: 1.0}}, InvalidRequest, "logit_bias"),
        ([1], {"logit_bias": {10**30: 1.0}}, InvalidRequest, "logit_bias"),
        ([1], {"stop": ("x",)}, InvalidRequest, "stop"),
        (
            [1],
            {"stop_token_ids": tuple(range(VOCAB_SIZE)), "min_tokens": 1},
            InvalidRequest,
            "min_tokens",
        ),
    ],
)
def test_refused_requests_leave_no_trace(
    prompt: list[int], params: dict[str, Any], error: type[InvalidRequest], param: str
) -> None:
    """A request that can never be answered is refused by name, and the engine goes on."""
    engine = make()
    running = make_sequence("r", make_prompt(5), **GREEDY)
    engine.add(running)
    engine.step()
    with pytest.raises(error) as caught:
        engine.add(core.Sequence("a", prompt, SamplingParams(**params)))
    assert type(caught.value) is error
    assert caught.value.param == param
    assert len(caught.value.message) < 200
    assert engine.stats.num_waiting == 0
    run(engine, [make_sequence("a", make_prompt(5), **GREEDY)])
    assert running.token_ids == plain(make_prompt(5), **GREEDY).token_ids


def test_an_id_in_use_is_refused() -> None:
    """Two running sequences cannot have one id; afterwards it is free again."""
    engine = make()
    engine.add(make_sequence("a", make_prompt(5)))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(make_sequence("a", make_prompt(5)))
    run(engine, [])
    run(engine, [make_sequence("a", make_prompt(5))])
    assert engine.stats.num_finished == {"length": 2}


def test_all_tokens_may_end_a_sequence() -> None:
    """A request that stops at any token is odd, but has an answer of one token."""
    seq = make_sequence("a", make_prompt(5), stop_token_ids=tuple(range(VOCAB_SIZE)))
    run(make(), [seq])
    assert seq.num_output_tokens == 1
    assert seq.finish_reason is FinishReason.STOP


# --- the cache ---


def test_the_cache_limits_the_context() -> None:
    """Where the cache holds less than the model's context, answers end with the cache, and a
    prompt that leaves no room in it is refused."""
    engine = make([JunkDrafter(VOCAB_SIZE)], kv_cache_tokens=64, max_draft_tokens=12)
    for max_tokens in (None, 500):
        seq = make_sequence("a", make_prompt(30), **GREEDY, max_tokens=max_tokens)
        run(engine, [seq])
        assert len(seq.token_ids) == 64 - 12
        assert seq.finish_reason is FinishReason.LENGTH
    with pytest.raises(PromptTooLong, match="context length is 52 tokens, and the prompt has 52"):
        engine.add(make_sequence("b", make_prompt(52)))


def test_sequences_wait_for_room() -> None:
    """Sequences that do not fit beside each other follow one another; all give their own answer."""
    sequences = [make_sequence(str(n), make_prompt(20, n), **GREEDY) for n in range(4)]
    wanted = futures_of(sequences)
    engine = make(kv_cache_tokens=64)
    for seq in sequences:
        engine.add(seq)
    engine.step()
    assert (engine.stats.num_running, engine.stats.num_waiting) == (1, 3)
    run(engine, [])
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted
    assert engine.stats.kv_cache_usage == 0.0


def test_a_cache_without_room_for_a_tree_is_refused() -> None:
    """A cache in which no request could ever be answered is an error of the configuration."""
    with pytest.raises(ConfigError, match="no room for one draft tree"):
        make([JunkDrafter(VOCAB_SIZE)], kv_cache_tokens=32, max_draft_tokens=31)
    seq = make_sequence("a", [3], max_tokens=None)
    run(make([JunkDrafter(VOCAB_SIZE)], kv_cache_tokens=32, max_draft_tokens=30), [seq])
    assert seq.num_output_tokens == 1


def test_the_longest_sequence_is_what_model_and_cache_allow() -> None:
    """The smaller of the two is reported, and a sequence gets that far and no further."""
    assert make(max_model_len=40).max_total_tokens == 40
    engine = make([JunkDrafter(VOCAB_SIZE)], kv_cache_tokens=64, max_draft_tokens=12)
    assert engine.max_total_tokens == 64 - 12
    seq = make_sequence("a", make_prompt(3), max_tokens=None)
    run(engine, [seq])
    assert len(seq.token_ids) == engine.max_total_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"max_draft_tokens": 200, "max_model_len": 100},
        {"max_draft_tokens": 16, "max_model_len": 4},
        {"max_draft_tokens": 12, "kv_cache_tokens": 32},
        {"max_draft_tokens": 1},
    ],
)
def test_the_budget_is_measured_in_any_configuration(options: dict[str, Any]) -> None:
    """Trees wider than the context or the cache are measured all the same, and still lossless."""
    drafters = [JunkDrafter(VOCAB_SIZE)]
    engine = make(drafters, adapts_budget=True, **options)
    seq = make_sequence("a", make_prompt(3), **GREEDY, max_tokens=8)
    run(engine, [seq])
    wanted = plain(make_prompt(3), **GREEDY, max_tokens=8).token_ids
    assert seq.token_ids == wanted[: len(seq.token_ids)]
    assert engine.stats.kv_cache_usage == 0.0


def test_learning_is_a_part_of_what_drafting_costs() -> None:
    """Drafts that are always right, and are thought about longer than they save, are paused."""
    wanted = plain(make_prompt(3), **GREEDY, max_tokens=60).token_ids
    engine = make([SlowLearner({"a": wanted})], adapts_budget=True)
    seq = make_sequence("a", make_prompt(3), **GREEDY, max_tokens=60)
    run(engine, [seq])
    assert seq.counts.num_accepted_tokens > 0
    assert seq.counts.num_drafts < seq.counts.num_steps / 2


@pytest.mark.parametrize("exact", [False, True])
def test_an_overflow_harms_nobody_else(exact: bool) -> None:
    """In float16 a sequence whose numbers overflow ends somehow; neither those beside it nor those
    that get its rows of the cache later are harmed."""
    model = make_model(dtype=torch.float16)
    poison = 7
    clean = [token for token in make_prompt(20) if token != poison]
    params: dict[str, Any] = {"logit_bias": {poison: -100.0}, "max_tokens": 8}
    wanted = make_sequence("a", clean, **params)
    run(make(model=model), [wanted])
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("inf")
    engine = make(model=model, exact=exact, kv_cache_tokens=96, max_num_sequences=2)
    sequences = [
        make_sequence(str(number), [poison, *clean] if number % 2 else clean, **params)
        for number in range(5)
    ]
    run(engine, sequences)
    for number, seq in enumerate(sequences):
        assert seq.finish_reason is FinishReason.LENGTH
        if number % 2 == 0:
            assert seq.token_ids == wanted.token_ids


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
    outputs = run(make(model=model), [bad, good])
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


@pytest.mark.parametrize("uses_blocks", [False, True])
@pytest.mark.parametrize(
    "options", [{}, GREEDY, {"logprobs": 1}, {**GREEDY, "min_tokens": 2}], ids=str
)
def test_drafts_that_the_model_makes_no_numbers_of_change_nothing(
    options: dict[str, Any], uses_blocks: bool
) -> None:
    """Neither of the request nor of those beside it."""
    model, poison = make_model(), 7
    clean = [[token for token in make_prompt(size) if token != poison] for size in (20, 1, 40)]
    params: dict[str, Any] = {**options, "max_tokens": 8}
    wanted = [plain(prompt, **params).token_ids for prompt in clean]
    assert not any(poison in token_ids for token_ids in wanted)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = make([PoisonDrafter(poison)], model=model, uses_blocks=uses_blocks)
    sequences = [make_sequence(str(n), prompt, **params) for n, prompt in enumerate(clean)]
    run(engine, sequences)
    assert [seq.token_ids for seq in sequences] == wanted
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in sequences)


@pytest.mark.parametrize(("exact", "poison"), [(False, 7), (True, 13)])
def test_what_is_tried_at_the_start_leaves_no_such_rows(exact: bool, poison: int) -> None:
    """Trees and contexts that hold a token of which the model makes no numbers go through it before
    the first request."""
    model = make_model()
    clean = [token for token in make_prompt(20) if token != poison]
    wanted = plain(clean, **GREEDY, max_tokens=8)
    assert poison not in wanted.output_token_ids
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    good = make_sequence("good", clean, **GREEDY, max_tokens=8)
    run(make(model=model, exact=exact, adapts_budget=True), [good])
    assert good.token_ids == wanted.token_ids


def test_rows_that_hold_no_numbers_reach_nobody_else() -> None:
    """A masked column counts for nothing, but nothing times what is no number is none."""
    model, poison = make_model(), 7
    clean = [token for token in make_prompt(20) if token != poison]
    wanted = plain(clean, **GREEDY, max_tokens=8)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = make(model=model, kv_cache_tokens=64, max_num_sequences=1)
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
    engine = make(drafters, tokenizer=TOKENIZER, kv_cache_tokens=96, max_num_sequences=2)
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


# --- aborts ---


def test_abort_frees_slot_and_drafters() -> None:
    """An aborted sequence is gone before the next step, running or waiting, started or not."""
    drafter = RecordingDrafter({name: [] for name in "abc"})
    finished: list[tuple[str, FinishReason | None]] = []
    loaded = prepare_model(make_model(), EngineConfig())
    config = ModelConfig(
        name="t",
        model="t",
        engine=EngineConfig(max_num_sequences=1, kv_cache_tokens=512, exact=False),
        drafting=DraftingConfig(adapts_budget=False),
    )
    engine = build_engine(
        config,
        loaded,
        (drafter,),
        on_finish=lambda seq: finished.append((seq.request_id, seq.finish_reason)),
    )
    for name in "abc":
        engine.add(make_sequence(name, make_prompt(5)))
    engine.step()
    engine.abort("b")
    engine.abort("a")
    engine.abort("unknown")
    assert (engine.stats.num_running, engine.stats.num_waiting) == (0, 1)
    assert engine.stats.kv_cache_usage == 0.0
    run(engine, [])
    assert finished == [
        ("b", FinishReason.ABORT),
        ("a", FinishReason.ABORT),
        ("c", FinishReason.LENGTH),
    ]
    started = [name for call, name in drafter.calls if call == "start"]
    assert started == [name for call, name in drafter.calls if call == "finish"] == ["a", "c"]


def test_a_failing_listener_stops_nobody() -> None:
    """What is done with finished outputs serves later drafts; when it fails, decoding goes on."""

    def fail(seq: core.Sequence) -> None:
        raise RuntimeError("the listener failed")

    config = ModelConfig(name="t", model="t", engine=EngineConfig(kv_cache_tokens=512, exact=False))
    engine = build_engine(config, prepare_model(make_model(), config.engine), (), on_finish=fail)
    sequences = [make_sequence(str(n), make_prompt(5)) for n in range(3)]
    run(engine, sequences)
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in sequences)
    assert engine.stats.num_drafter_failures == {"engine.on_finish": 3}


# --- what is told to whom ---


def test_drafters_are_told_the_whole_story() -> None:
    """Per sequence ``start``, then ``propose`` and ``observe`` in turn, then ``finish``; what is
    observed is what was appended, with the forward's own outputs for every node."""
    model = make_model()
    prompt = make_prompt(21)
    future = plain(prompt, temperature=0.8).token_ids
    drafter = RecordingDrafter({"a": future})
    seq = make_sequence("a", prompt, temperature=0.8)
    engine = make([drafter], model=model)
    run(engine, [seq])
    assert engine.stats.num_drafter_failures == {}
    calls = [call for call, _ in drafter.calls]
    assert calls[0] == "start"
    assert calls[-1] == "finish"
    pairs = calls[1:-1]
    if len(pairs) % 2:
        assert pairs.pop(-1) == "observe", "the last step had no room for drafts"
    assert pairs == ["propose", "observe"] * (len(pairs) // 2)
    for tree, acceptance, token_ids, forward in drafter.observed:
        assert token_ids[-len(acceptance.token_ids) :] == list(acceptance.token_ids)
        before = token_ids[: -len(acceptance.token_ids)]
        assert before[-1] == tree.token_ids[0]
        check_forward(model, before, tree, forward)


class TellingDrafter(Drafter):
    """Drafts nothing and keeps what it is told, with the length of the sequence then."""

    name = "telling"

    def __init__(self) -> None:
        self.told: list[tuple[int, DraftTree, Acceptance]] = []
        self.num_started = 0

    def start(self, seq: core.Sequence) -> None:
        self.num_started = len(seq.token_ids)

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        pass

    def observe(
        self, seq: core.Sequence, tree: DraftTree, acceptance: Acceptance, forward: Forward | None
    ) -> None:
        self.told.append((len(seq.token_ids), tree, acceptance))


class Pauses(DraftBudget):
    """Wants drafts in every ``period``-th step from ``first`` on."""

    def __init__(self, first: int, period: int) -> None:
        super().__init__(BatchCost({1: ForwardCost({1: 1.0, 64: 1.0})}))
        self._steps = count(-first)
        self._period = period

    def wants_drafts(self, num_sequences: int) -> bool:
        step = next(self._steps)
        return step >= 0 and step % self._period == 0


@pytest.mark.parametrize(("first", "period"), [(0, 1), (0, 7), (5, 1), (5, 7), (40, 1)])
def test_drafters_are_told_of_plain_steps_when_drafts_are_wanted(first: int, period: int) -> None:
    """At the start what there is then, later several tokens at once, each once and in order, as a
    path that was accepted."""
    drafter = TellingDrafter()
    seq = make_sequence("a", make_prompt(9), **GREEDY, max_tokens=40)
    engine = make([drafter])
    engine._drafts._budget = Pauses(first, period)
    run(engine, [seq])
    if first >= 40:
        assert not drafter.told
        assert drafter.num_started == 0
        return
    assert drafter.num_started == 9 + first
    text = seq.token_ids[: drafter.num_started]
    for num_tokens_then, tree, acceptance in drafter.told:
        assert tree.token_ids == [text[-1], *acceptance.token_ids[:-1]]
        assert list(acceptance.path) == list(range(len(tree)))
        assert set(tree.sources) == {core.Source.PLAIN}
        text += acceptance.token_ids
        assert len(text) == num_tokens_then
    assert text == seq.token_ids[: len(text)]
    assert len(seq.token_ids) - len(text) <= period


def test_drafters_begin_with_few_texts_in_a_step() -> None:
    """After a pause others go on meanwhile; all have begun some steps later."""

    class Starting(TellingDrafter):
        def start(self, seq: core.Sequence) -> None:
            starts[-1] += 1

    starts: list[int] = []
    engine = make(
        [Starting()], max_num_sequences=40, kv_cache_tokens=16384, prefill_chunk_tokens=16384
    )
    for number in range(40):
        engine.add(make_sequence(str(number), make_prompt(240), **GREEDY, max_tokens=5))
    while engine.stats.num_running + engine.stats.num_waiting:
        starts.append(0)
        engine.step()
    assert (max(starts), sum(starts)) == (35, 40)


def test_requests_without_drafts_are_no_business_of_drafters() -> None:
    drafter = TellingDrafter()
    speculation = SpeculationParams(is_enabled=False)
    seq = make_sequence("a", make_prompt(9), speculation, **GREEDY, max_tokens=8)
    run(make([drafter]), [seq])
    assert (drafter.num_started, drafter.told) == (0, [])


def check_forward(
    model: torch.nn.Module, before: list[int], tree: DraftTree, forward: Forward
) -> None:
    """The forward's outputs at every node are those of the stock model on the node's own path."""
    name = model.config._attn_implementation
    model.set_attn_implementation("eager")
    tokens, logits = forward.top_tokens(3)
    assert tokens.shape == logits.shape == (len(tree), 3)
    for node in range(len(tree)):
        path = [tree.token_ids[step] for step in tree.path_to(node)[1:]]
        with torch.no_grad():
            output = model(torch.tensor([before + path]), output_hidden_states=True)
        wanted = output.logits[0, -1].float().topk(3)
        assert tokens[node].tolist() == wanted.indices.tolist()
        assert logits[node].tolist() == pytest.approx(wanted.values.tolist(), abs=1e-4)
        hidden = output.hidden_states[-1][0, -1]
        torch.testing.assert_close(forward.hidden(node), hidden, rtol=1e-4, atol=1e-5)
    model.set_attn_implementation(name)


def test_outputs_say_where_tokens_came_from() -> None:
    """The outputs of a sequence are its tokens in order, each with its source: drafted as long as
    the drafts were right, the last one of a step decided without."""
    prompt = make_prompt(9)
    future = plain(prompt, temperature=0.8).token_ids
    seq = make_sequence("a", prompt, temperature=0.8)
    outputs = run(make([OracleDrafter({"a": future})]), [seq])
    assert [token for output in outputs for token in output.token_ids] == seq.output_token_ids
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    for output in outputs[:-1]:
        assert output.sequence is seq
        assert len(output.sources) == len(output.token_ids)
        assert output.sources[-1] is Source.PLAIN
        assert set(output.sources[:-1]) <= {Source.OTHER}
    assert max(len(output.token_ids) for output in outputs) == 6
    assert outputs[-1].token_ids[-1] == seq.token_ids[-1]


def test_a_step_that_is_cut_short_has_drafted_tokens_alone() -> None:
    """Where the end comes among the accepted drafts, the last token is one of them, too."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY).token_ids
    stop = future[len(prompt) + 2]
    seq = make_sequence("a", prompt, **GREEDY, stop_token_ids=(stop,))
    (output,) = run(make([OracleDrafter({"a": future})]), [seq])
    assert output.token_ids == tuple(future[len(prompt) : len(prompt) + 3])
    assert set(output.sources) == {Source.OTHER}


def test_logprobs_are_one_per_token() -> None:
    """Asked for, every output has the log probabilities of its own tokens; else none has any."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY).token_ids
    for num_top in (0, 3):
        seq = make_sequence("a", prompt, **GREEDY, logprobs=num_top)
        for output in run(make([OracleDrafter({"a": future})]), [seq]):
            assert output.logprobs is not None
            assert [item.token_id for item in output.logprobs] == list(output.token_ids)
            assert {len(item.top) for item in output.logprobs} == {num_top}
    outputs = run(make(), [make_sequence("a", prompt, **GREEDY)])
    assert all(output.logprobs is None for output in outputs)


def outputs_by_sequence(outputs: Iterable[StepOutput]) -> dict[str, list[StepOutput]]:
    found: dict[str, list[StepOutput]] = {}
    for output in outputs:
        found.setdefault(output.sequence.request_id, []).append(output)
    return found


def test_stats_add_up() -> None:
    """The engine's counters equal the sums over its sequences and over its outputs."""
    sequences = [make_sequence(str(n), make_prompt(4 + 13 * n, n), **GREEDY) for n in range(4)]
    futures = futures_of(sequences)
    sequences[2] = make_sequence(
        "2", make_prompt(30, 2), SpeculationParams(is_enabled=False), **GREEDY
    )
    engine = make([OracleDrafter(futures)])
    outputs = run(engine, sequences)
    stats, total = engine.stats, core.DraftCounts()
    for seq in sequences:
        add_counts(total, seq.counts)
    assert stats.drafts == total
    by_size = stats.num_steps_by_draft_tokens
    assert sum(by_size) == total.num_steps
    assert sum(by_size[1:]) == total.num_drafts
    assert sum(size * count for size, count in enumerate(by_size)) == total.num_draft_tokens
    assert stats.num_prompt_tokens == sum(seq.num_prompt_tokens for seq in sequences)
    assert stats.num_output_tokens == sum(seq.num_output_tokens for seq in sequences)
    assert stats.num_finished == {"length": 4}
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert stats.num_drafter_failures == {}
    assert stats.num_kv_tokens == 2048
    for name, own in outputs_by_sequence(outputs).items():
        counts = own[0].sequence.counts
        assert counts.num_steps == len(own)
        assert counts.num_steps + counts.num_accepted_tokens == own[0].sequence.num_output_tokens
        assert sum(counts.num_drafts_by_accepted) == counts.num_drafts <= counts.num_steps
        weighted = sum(n * count for n, count in enumerate(counts.num_drafts_by_accepted))
        assert weighted == counts.num_accepted_tokens
        assert sum(counts.accepted_by_source.values()) == counts.num_accepted_tokens
        assert sum(counts.draft_tokens_by_source.values()) == counts.num_draft_tokens
        assert (counts.num_drafts == 0) == (name == "2")


def test_an_idle_engine_does_nothing() -> None:
    """Without work a step gives nothing and counts nothing."""
    engine = make()
    assert not engine.has_work
    assert engine.step() == []
    assert engine.stats.num_steps == 0


def test_prefill_steps_give_no_output() -> None:
    """While a prompt goes through in chunks there are no outputs; prompt tokens are counted."""
    engine = make(prefill_chunk_tokens=8)
    engine.add(make_sequence("a", make_prompt(20), **GREEDY))
    assert engine.step() == []
    assert engine.step() == []
    assert engine.stats.num_prompt_tokens == 16
    (output,) = engine.step()
    assert len(output.token_ids) == 1
    assert engine.stats.num_prompt_tokens == 20


@pytest.mark.parametrize(
    ("call", "num_before"),
    [("start", 1), ("propose", 3), ("observe", 2), ("observe", 3), ("finish", 0), ("finish", 1)],
)
def test_an_interrupted_step_leaves_nothing_wrong(call: str, num_before: int) -> None:
    """What ran ends, and says so in the next step; what waits is answered; and what begins like
    the text whose step was interrupted gets the tokens it gets by itself."""
    prompts = {name: make_prompt(40, seed) for seed, name in enumerate("abc")}
    futures = {name: plain(prompt, **GREEDY).token_ids for name, prompt in prompts.items()}
    drafter = InterruptedDrafter(futures, call, num_before)
    engine = make([drafter], max_num_sequences=2)
    sequences = [make_sequence(name, prompt, **GREEDY) for name, prompt in prompts.items()]
    first, second, third = sequences
    for seq in sequences:
        engine.add(seq)
    with pytest.raises(KeyboardInterrupt):
        run(engine, [])
    for seq in (first, second):
        if seq.finish_reason is None:
            engine.abort(seq.request_id)
    ended = {}
    while engine.has_work:
        outputs = engine.step()
        ended |= {out.sequence.request_id: out for out in outputs if out.finish_reason}
    if third.finish_reason == "length":
        assert third.token_ids == futures["c"]
    assert engine.stats.num_running == 0
    assert engine.stats.num_drafter_sequences == 0
    for name, seq in zip("ab", (first, second), strict=True):
        assert seq.finish_reason in ("error", "length")
        if seq.finish_reason == "error":
            assert isinstance(ended[name].error, HdserveError)
        prompt = [*seq.token_ids[:-1], 3]
        (output,) = {id(out.sequence): out.sequence for out in _run_again(engine, prompt)}.values()
        assert output.token_ids == plain(prompt, **GREEDY).token_ids


def _run_again(engine: Engine, prompt: list[int]) -> list[StepOutput]:
    off = SpeculationParams(is_enabled=False)
    return run(engine, [make_sequence("again", prompt, off, **GREEDY)])

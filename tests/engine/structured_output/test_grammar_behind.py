"""A grammar that holds behind reasoning: what is free before, and the same tokens with drafts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hdserve import core, grammar
from hdserve.core import FinishReason, StepOutput
from hdserve.databases.model import ModelDatabase
from hdserve.drafting.base import Drafter, DraftResources
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.engine.engine import Engine
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.tokenization.tokenizer import Tokenizer
from hdserve.errors import InvalidRequest
from tests.drafters import JunkDrafter, OracleDrafter
from tests.engine.structured_output.test_grammar import (
    GRAMMARS,
    MODEL,
    PROMPT,
    SCHEMA,
    TOKENIZER,
    make_tokenizer,
)
from tests.engines import make_engine, make_sequence, run

END, OPEN, CLOSE, OTHER = range(256, 260)
ANSWER = grammar.json_schema(SCHEMA)


def make_marked_tokenizer() -> Tokenizer:
    """One that has a token for each mark."""
    backend = make_tokenizer().backend
    backend.add_tokens(["<think>", "</think>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


MARKED = make_marked_tokenizer()
MARKED_GRAMMARS = Grammars(MARKED, 260, {END})


def behind(reasoning: str, answer: str = ANSWER) -> str:
    rules = f"start: {reasoning} @answer\nblank: /\\n{{0,2}}/"
    return grammar.behind(rules, answer, {"opening": "<think>"}, {"thought": ["</think>"]})


FORMS = {"open": behind("thought blank"), "may open": behind("(opening thought blank)?")}


def allowed(grammars: Grammars, text: str, token_ids: Iterable[int]) -> set[int]:
    """What may come behind ``token_ids``, each of which may come."""
    state = grammars.state(text)
    for token_id in token_ids:
        assert state.apply(torch.zeros(1, 260))[0, token_id].isfinite()
        state.push(token_id)
    return set(state.apply(torch.zeros(1, 260))[0].isfinite().nonzero()[:, 0].tolist())


def test_all_is_free_up_to_the_mark() -> None:
    """But for the end of the output, so that an answer that ends is one of the grammar."""
    free = {*range(260)} - {END}
    assert allowed(MARKED_GRAMMARS, FORMS["open"], []) == free
    assert allowed(MARKED_GRAMMARS, FORMS["may open"], []) == {OPEN, *b"{"}
    for begun in ([OPEN], [OPEN, *b"{a\xff", OPEN, OTHER]):
        assert allowed(MARKED_GRAMMARS, FORMS["may open"], begun) == free
        assert allowed(MARKED_GRAMMARS, FORMS["open"], begun) == free
    for begun in ([CLOSE], [*b"so {} </think", CLOSE]):
        assert allowed(MARKED_GRAMMARS, FORMS["open"], begun) == {*b"\n{"}
        assert allowed(MARKED_GRAMMARS, FORMS["open"], [*begun, *b"\n\n"]) == {*b"{"}
    assert allowed(MARKED_GRAMMARS, FORMS["may open"], b"{") == allowed(GRAMMARS, ANSWER, b"{")


def test_marks_that_are_no_tokens() -> None:
    """The first text that is the closing one ends what is free, however its tokens divide it."""
    assert allowed(GRAMMARS, FORMS["may open"], []) == {*b"<{"}
    assert allowed(GRAMMARS, FORMS["may open"], b"<") == {*b"t"}
    begun = b"<think>a</think</ </think>"
    assert len(allowed(GRAMMARS, FORMS["may open"], begun[:-1])) > 128
    assert allowed(GRAMMARS, FORMS["may open"], begun) == {*b"\n{"}


def test_other_marks_may_not_come_in_between() -> None:
    rules = {"thought": ["</think>", "<think>", "no token"]}
    text = grammar.behind("start: thought @answer", ANSWER, {}, rules)
    assert allowed(MARKED_GRAMMARS, text, b"a") == {*range(260)} - {END, OPEN}


def test_what_is_wrong_is_told_as_of_the_answer_alone() -> None:
    wrong = grammar.json_schema({"type": "frob"})
    reasons = []
    for text in (wrong, behind("thought blank", wrong)):
        with pytest.raises(InvalidRequest) as caught:
            MARKED_GRAMMARS.check(text)
        reasons.append(caught.value.message)
    assert reasons[0] == reasons[1]


def test_each_answer_may_be_behind_reasoning() -> None:
    """One of several forms, too, and one that spells a special token."""
    either = grammar.either(grammar.lark('start: mark "x"', {"mark": "<think>"}), ANSWER)
    spelt = grammar.choice(["a <end> x", "b"])
    marks = grammar.choice(["no </think> no"])
    for answer, output in (
        (either, [OPEN, *b"x"]),
        (spelt, [*b"a <end> x"]),
        (marks, [*b"no </think> no"]),
    ):
        state = MARKED_GRAMMARS.state(behind("thought blank", answer))
        for token_id in (*b"ab", CLOSE, *output):
            assert state.apply(torch.zeros(1, 260))[0, token_id].isfinite()
            state.push(token_id)
        assert state.error is None


def engine_of(drafters: Iterable[Drafter], tokenizer: Tokenizer, **options: Any) -> Engine:
    return make_engine(drafters, model=MODEL, tokenizer=tokenizer, **options)


def sequences_of(text: str, **options: Any) -> list[core.Sequence]:
    return [
        make_sequence(
            str(seed),
            PROMPT[: len(PROMPT) - 7 * seed],
            **{"max_tokens": 90, "seed": seed, "temperature": 1.0, "grammar": text, **options},
        )
        for seed in range(4)
    ]


def num_crossing(outputs: Iterable[StepOutput], mark: int) -> int:
    """How many drafts were accepted to behind the mark, not only up to it."""
    return sum(mark in output.token_ids[:-2] for output in outputs)


BIASES: dict[str, dict[str, Any]] = {
    "soon": {"logit_bias": {OPEN: 6.0, CLOSE: 4.0}},
    "at once": {"logit_bias": {OPEN: 6.0, CLOSE: 8.0}},
    "greedy": {"logit_bias": {OPEN: 6.0, CLOSE: 8.0}, "temperature": 0.0},
    "never": {"logit_bias": {OPEN: -100.0, CLOSE: -100.0}, "logprobs": 1},
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("name", FORMS)
def test_tokens_are_those_without_drafts(name: str, bias: str) -> None:
    """From the databases, from guesses that are right, which cross the mark, and from ones that
    are not; with room for many and for few."""
    plain = sequences_of(FORMS[name], **BIASES[bias])
    run(engine_of((), MARKED), plain)
    for seq in plain:
        written = seq.output_token_ids
        if CLOSE in written:
            answer = written[written.index(CLOSE) + 1 :]
        else:
            answer = [] if name == "open" or OPEN in written[:1] else written
        if seq.finish_reason is FinishReason.STOP:
            said = bytes(token_id for token_id in answer if token_id < 256)
            jsonschema.validate(json.loads(said), SCHEMA)
    futures = {seq.request_id: seq.token_ids for seq in plain}
    crossed = 0
    for drafters, options in (
        ([Hierarchy(DraftResources(260, ModelDatabase(1 << 20)))], {}),
        ([OracleDrafter(futures, 8)], {}),
        ([OracleDrafter(futures)], {"max_draft_tokens": 3, "adapts_budget": True}),
        ([JunkDrafter(260)], {}),
    ):
        batch = sequences_of(FORMS[name], **BIASES[bias])
        engine = engine_of(drafters, MARKED, **options)
        outputs = run(engine, batch)
        assert engine.stats.num_drafter_failures == {}
        assert [seq.token_ids for seq in batch] == [seq.token_ids for seq in plain]
        if options == {}:
            crossed += num_crossing(outputs, CLOSE)
    assert crossed > 0 or bias == "never"


def test_sequences_that_wait_for_room_go_on_where_they_were() -> None:
    """Before the mark and behind it."""
    options = {"max_tokens": 380, "logit_bias": {CLOSE: -1.0}}
    plain = sequences_of(FORMS["open"], **options)
    run(engine_of((), MARKED), plain)
    futures = {seq.request_id: seq.token_ids for seq in plain}
    batch = sequences_of(FORMS["open"], **options)
    engine = engine_of([OracleDrafter(futures)], MARKED, kv_cache_tokens=896)
    outputs = run(engine, batch)
    assert engine.stats.num_preemptions > 0
    assert [seq.token_ids for seq in batch] == [seq.token_ids for seq in plain]
    assert num_crossing(outputs, CLOSE) > 0


def test_tokens_are_those_without_drafts_where_marks_are_texts() -> None:
    plain = sequences_of(FORMS["may open"], logit_bias={ord("<"): 9.0, ord("/"): 3.0})
    run(engine_of((), TOKENIZER), plain)
    assert all(bytes(seq.output_token_ids).startswith(b"<think>") for seq in plain)
    futures = {seq.request_id: seq.token_ids for seq in plain}
    batch = sequences_of(FORMS["may open"], logit_bias={ord("<"): 9.0, ord("/"): 3.0})
    run(engine_of([OracleDrafter(futures)], TOKENIZER), batch)
    assert [seq.token_ids for seq in batch] == [seq.token_ids for seq in plain]


def test_what_ends_reasoning_but_for_the_mark() -> None:
    """The limit, and what the request names; the model's own end does not."""
    (one, *_) = sequences_of(FORMS["open"], logit_bias={CLOSE: -100.0, END: 100.0})
    run(engine_of((), MARKED), [one])
    assert one.finish_reason is FinishReason.LENGTH
    assert END not in one.output_token_ids
    stopping = {"logit_bias": {CLOSE: -100.0, OTHER: 100.0}, "stop_token_ids": (OTHER,)}
    (one, *_) = sequences_of(FORMS["open"], **stopping)
    run(engine_of((), MARKED), [one])
    assert one.finish_reason is FinishReason.STOP
    assert one.output_token_ids == [OTHER]


class CountedCalls:
    """A matcher whose calls are counted by name."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.numbers = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.numbers[name] += 1
        return getattr(self._matcher, name)


@pytest.mark.parametrize("num_tokens", [1_000, 10_000])
def test_long_reasoning_costs_no_more_than_short(num_tokens: int) -> None:
    """Each token is read once, however many there are, since no lexer is full; a guide that comes
    late reads all of them at once."""
    state = MARKED_GRAMMARS.state(FORMS["open"])
    assert state.guide is not None
    matcher, guide = CountedCalls(state._matcher), CountedCalls(state.guide._matcher)
    state._matcher, state.guide._matcher = matcher, guide
    written = [token_id % 256 for token_id in range(num_tokens)]
    for token_id in written:
        state.push(token_id)
    state.guide.follow(written)
    names = ("consume_token", "consume_tokens", "compute_bitmask")
    assert [matcher.numbers[name] for name in names] == [num_tokens, 0, 0]
    assert [guide.numbers[name] for name in names] == [0, 1, 1]
    assert state.guide.forced() == []
    state.push(CLOSE)
    state.guide.follow([*written, CLOSE, *b"\n\n"])
    assert bytes(state.guide.forced()) == b"{"
    assert state.error is None

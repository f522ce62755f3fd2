"""Drafts of structured output: what is forced, nothing that is forbidden, and the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from hdserve import core, grammar
from hdserve.core import FinishReason, Source, SpeculationParams
from hdserve.databases.model import ModelDatabase
from hdserve.drafting.base import Drafter, DraftResources
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.drafting.prompt_lookup import PromptLookup
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.tree import DraftTree
from tests.drafters import JunkDrafter, OracleDrafter
from tests.engine.structured_output.test_grammar import GRAMMARS, MODEL, PROMPT, SCHEMA, TOKENIZER
from tests.engines import make_engine, make_sequence, run


class LetterDrafter(Drafter):
    """Drafts many paths of two letters."""

    name = "letters"

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        draw = random.Random(len(seq.token_ids))
        while not tree.is_full:
            tree.add_path(draw.choices(b"ab", k=12), Source.OTHER, 0.1)


TEXTS = {
    "schema": grammar.json_schema(SCHEMA),
    "regex": grammar.regex(r"(id|no)-[0-9]{4}/(north|south)(, [a-z]{1,8}){2}"),
    "choice": grammar.choice(["a first answer", "a second answer", "none of them"]),
    "lark": grammar.lark('start: "begin " inner " end"\ninner: "x" | "(" inner ")"'),
    "spelt": grammar.choice(["an <end> x", "an <end> y"]),
}
SAMPLED: dict[str, Any] = {"temperature": 1.0}
GREEDY: dict[str, Any] = {"temperature": 0.0}
WAYS_TO_CHOOSE = (GREEDY, SAMPLED, {**SAMPLED, "top_k": 40, "logprobs": 1})


def hierarchy() -> Hierarchy:
    return Hierarchy(DraftResources(260, ModelDatabase(1 << 20)))


def sequences_of(text: str, number: int = 3, **options: Any) -> list[core.Sequence]:
    """Prompts as long as several chunks and as a part of one."""
    return [
        make_sequence(
            str(seed),
            PROMPT[: len(PROMPT) - 7 * seed],
            **{"max_tokens": 70, "seed": seed, "grammar": text, **options},
        )
        for seed in range(number)
    ]


def drafted(
    drafters: Iterable[Drafter], sequences: list[core.Sequence], **options: Any
) -> list[DraftTree]:
    """Decode in one batch; the trees that were verified."""
    engine = make_engine(drafters, model=MODEL, tokenizer=TOKENIZER, **options)
    outputs = run(engine, sequences)
    assert engine.stats.num_drafter_failures == {}
    return [output.draft for output in outputs if output.draft is not None]


def tokens_of(sequences: list[core.Sequence]) -> list[list[int]]:
    return [seq.token_ids for seq in sequences]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=() if (number + other) % 3 == 0 else pytest.mark.slow)
        for number, name in enumerate(TEXTS)
        for other, options in enumerate(WAYS_TO_CHOOSE)
    ],
)
def test_tokens_are_those_without_drafts(name: str, options: dict[str, Any]) -> None:
    """Alone and in a batch, from the databases, from guesses that are right, and from ones that are
    not; with the budget and without, with room for many guesses and for few."""
    plain = sequences_of(TEXTS[name], **options)
    drafted((), plain)
    futures = {seq.request_id: seq.token_ids for seq in plain}
    for drafters, setting in (
        ([hierarchy()], {}),
        ([hierarchy()], {"adapts_budget": True}),
        ([hierarchy(), OracleDrafter(futures)], {"max_draft_tokens": 3}),
        ([JunkDrafter(260)], {}),
        ([PromptLookup(DraftResources(260))], {}),
    ):
        batch = sequences_of(TEXTS[name], **options)
        drafted(drafters, batch, **setting)
        assert tokens_of(batch) == tokens_of(plain)
    alone = sequences_of(TEXTS[name], **options)[-1]
    drafted([hierarchy()], [alone])
    assert alone.token_ids == plain[-1].token_ids


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_drafted_may_come(name: str) -> None:
    """Every forced token is accepted, but for one that ends the text, no node is forbidden, and no
    tree is deeper than what may still be said."""
    sequences = sequences_of(TEXTS[name], **SAMPLED)
    engine = make_engine([hierarchy(), JunkDrafter(260)], model=MODEL, tokenizer=TOKENIZER)
    outputs = run(engine, sequences)
    num_output = {seq.request_id: 0 for seq in sequences}
    for output in outputs:
        seq, tree = output.sequence, output.draft
        if tree is None:
            continue
        number = num_output[seq.request_id]
        num_output[seq.request_id] += len(output.token_ids)
        guide = GRAMMARS.state(TEXTS[name]).guide
        assert guide is not None
        guide.follow(seq.output_token_ids[:number])
        num_forced = tree.sources.count(Source.GRAMMAR)
        assert guide.forced()[:num_forced] == tree.token_ids[1 : 1 + num_forced]
        assert all(guide.allowed(tree, num_forced))
        assert max(tree.depths) < 70 - number
    for seq in sequences:
        forced = seq.counts.draft_tokens_by_source.get(Source.GRAMMAR, 0)
        assert forced - seq.counts.accepted_by_source.get(Source.GRAMMAR, 0) in (0, 1)
        assert (forced > 0) == (name != "spelt")


def test_drafters_go_on_behind_what_is_forced() -> None:
    """Of one who guesses from the root, too: what equals the forced tokens is merged."""
    text = grammar.regex(r"the answer is [0-9]{3}")
    plain = make_sequence("0", PROMPT, grammar=text)
    drafted((), [plain])
    for drafter in (OracleDrafter({"0": plain.token_ids}, 17), hierarchy()):
        seq = make_sequence("0", PROMPT, grammar=text)
        first = drafted([drafter], [seq], max_draft_tokens=20)[0]
        assert first.sources[1:15] == [Source.GRAMMAR] * 14
        if isinstance(drafter, OracleDrafter):
            assert first.num_draft_tokens > 14
            assert seq.counts.num_steps <= 2


@pytest.mark.parametrize(
    "speculation",
    [SpeculationParams(is_enabled=False), SpeculationParams(max_draft_tokens=0)],
    ids=["off", "none"],
)
def test_no_drafts_are_none(speculation: SpeculationParams) -> None:
    seq = make_sequence("0", PROMPT, speculation, grammar=TEXTS["schema"], max_tokens=60)
    drafted([hierarchy()], [seq])
    assert seq.counts.num_draft_tokens == 0
    assert seq.counts.num_steps == seq.num_output_tokens


def test_a_request_may_name_other_sources() -> None:
    """What is forced is drafted where its source may draft, what is forbidden nowhere."""
    for label, other in (("other", Source.GRAMMAR), ("grammar", Source.OTHER)):
        speculation = SpeculationParams(databases=frozenset({label}))
        seq = make_sequence("0", PROMPT, speculation, grammar=TEXTS["regex"])
        plain = make_sequence("0", PROMPT, grammar=TEXTS["regex"])
        drafted((), [plain])
        engine = make_engine(
            [OracleDrafter({"0": plain.token_ids})], model=MODEL, tokenizer=TOKENIZER
        )
        run(engine, [seq])
        assert seq.token_ids == plain.token_ids
        assert seq.counts.num_accepted_tokens > 0
        assert other not in seq.counts.draft_tokens_by_source


def test_what_fails_costs_drafts_alone() -> None:
    """A guide of another grammar cannot follow the text: it is counted once, the sequence goes on
    as if there were none to ask, and the other one with its own."""
    text = TEXTS["schema"]
    plain = sequences_of(text, 2)
    drafted((), plain)
    sequences = sequences_of(text, 2)
    for seq in sequences:
        seq.grammar_state = GRAMMARS.state(text)
    sequences[0].grammar_state.guide = GRAMMARS.state(TEXTS["choice"]).guide
    futures = {seq.request_id: seq.token_ids for seq in plain}
    engine = make_engine([OracleDrafter(futures)], model=MODEL, tokenizer=TOKENIZER)
    run(engine, sequences)
    assert tokens_of(sequences) == tokens_of(plain)
    assert engine.stats.num_drafter_failures == {("grammar", "propose"): 1}
    assert [seq.grammar_state.guide is None for seq in sequences] == [True, False]
    assert sequences[0].counts.num_accepted_tokens > 20


@pytest.mark.parametrize("step_fuel", [100, 200])
def test_guesses_take_nothing_of_what_choices_may_take(step_fuel: int) -> None:
    """A grammar that needs too much work does so at the same token with drafts as without."""
    exploding = grammar.regex("(a|b)*a(a|b){40}")
    ends = []
    for drafters in ((), [LetterDrafter()], [hierarchy()]):
        grammars = Grammars(TOKENIZER, 260, {256}, step_fuel=step_fuel)
        seq = make_sequence("0", [5, 6, 7], grammar=exploding, max_tokens=80)
        engine = make_engine(drafters, model=MODEL, tokenizer=TOKENIZER, grammars=grammars)
        run(engine, [seq])
        ends.append((seq.finish_reason, seq.token_ids))
    assert ends[0] == ends[1] == ends[2]
    assert ends[0][0] is FinishReason.ERROR


def test_a_recording_is_not_held_to_the_grammar() -> None:
    """Whatever it says is repeated, with drafts from elsewhere."""
    seq = make_sequence("0", PROMPT, grammar=TEXTS["choice"], max_tokens=20)
    seq.recorded_token_ids = tuple(b"a first answer")
    drafted([hierarchy()], [seq])
    assert Source.GRAMMAR not in seq.counts.draft_tokens_by_source


def test_sequences_without_a_grammar_do_not_ask_for_one() -> None:
    engine = make_engine([hierarchy()], model=MODEL, tokenizer=TOKENIZER)
    run(engine, [make_sequence("0", PROMPT)])
    assert engine.stats.drafter_times_s["grammar", "propose"] == 0.0

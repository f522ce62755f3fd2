"""Structured output holds what its grammar says, and drafts change none of its tokens."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from string import ascii_lowercase
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import tokenizers
import torch
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hdserve import core, grammar
from hdserve.core import FinishReason
from hdserve.drafting.base import Drafter
from hdserve.engine.structured_output import grammar as grammar_module
from hdserve.engine.structured_output.grammar import Grammars, GrammarState, _reason
from hdserve.engine.tokenization.tokenizer import Tokenizer
from hdserve.errors import GrammarsOverloaded, HdserveError, InvalidRequest
from hdserve.schema.keywords import HELD_FORMATS
from tests.drafters import JunkDrafter, OracleDrafter
from tests.engines import make_engine, make_prompt, make_sequence, run

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["San Jose", "Seoul", "Zürich"]},
        "guests": {"type": "integer", "minimum": 1, "maximum": 99},
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
        "smoking": {"type": ["boolean", "null"]},
    },
    "required": ["city", "guests", "name", "tags", "smoking"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-z]{2,6}$"}},
}


def make_tokenizer() -> Tokenizer:
    """One token per byte, and one that ends a text."""
    characters = bytes_to_unicode()
    vocab = {character: byte for byte, character in characters.items()}
    backend = tokenizers.Tokenizer(BPE(vocab={**vocab, "<end>": 256}, merges=[]))
    backend.pre_tokenizer = ByteLevelSplit(add_prefix_space=False)
    backend.decoder = ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


def make_wide_tokenizer() -> Tokenizer:
    """One whose last token, which is no special one, the model lacks."""
    backend = make_tokenizer().backend
    backend.add_tokens(["[0]", "[1]", "[2]", "[TOOL]"])
    assert backend.token_to_id("[TOOL]") == 260
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


def make_byte_model() -> torch.nn.Module:
    """A random model of that vocabulary, a little wider than it."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=256,
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval().to(torch.float64)


TOKENIZER = make_tokenizer()
MODEL = make_byte_model()
GRAMMARS = Grammars(TOKENIZER, 260, {256})
PROMPT = TOKENIZER.encode("I would like to book a table.")


def answers(
    drafters: Iterable[Drafter], text: str, **options: Any
) -> tuple[list[core.Sequence], list[str]]:
    """What four seeds give in one batch."""
    sequences = [
        make_sequence(
            str(seed), PROMPT, **{"max_tokens": 300, "seed": seed, "grammar": text, **options}
        )
        for seed in range(4)
    ]
    outputs = run(make_engine(drafters, model=MODEL, tokenizer=TOKENIZER), sequences)
    texts = [
        "".join(output.text for output in outputs if output.sequence is seq) for seq in sequences
    ]
    return sequences, texts


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 40, "repetition_penalty": 1.2, "logprobs": 2},
        {"temperature": 1.0, "ignore_eos": True, "min_tokens": 3},
    ],
    ids=str,
)
def test_valid_and_equal_with_drafts(options: dict[str, Any]) -> None:
    """Every answer is what the schema allows, ends by itself, and is the same with right drafts,
    with wrong ones and with none."""
    text = grammar.json_schema(SCHEMA)
    sequences, texts = answers((), text, **options)
    for seq, answer in zip(sequences, texts, strict=True):
        jsonschema.validate(json.loads(answer), SCHEMA)
        assert seq.finish_reason is FinishReason.STOP
    if options["temperature"]:
        assert len(set(texts)) > 1
    futures = {seq.request_id: seq.token_ids for seq in sequences}
    for drafters in ([OracleDrafter(futures)], [JunkDrafter(260)]):
        drafted, drafted_texts = answers(drafters, text, **options)
        assert [seq.token_ids for seq in drafted] == [seq.token_ids for seq in sequences]
        assert drafted_texts == texts
        if isinstance(drafters[0], OracleDrafter):
            assert sum(seq.counts.num_accepted_tokens for seq in drafted) > 20


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (grammar.regex(r"[a-c]{3}/[0-9]{2}"), r"[a-c]{3}/[0-9]{2}"),
        (
            grammar.choice(["yes", 'no "really"', "naïve\n", "\x7f"]),
            'yes|no "really"|naïve\n|\x7f',
        ),
        (grammar.lark('start: "a" inner "z"\ninner: "b" | "(" inner ")"'), r"a\(*b\)*z"),
    ],
    ids=["regex", "choice", "lark"],
)
def test_other_grammars(text: str, pattern: str) -> None:
    """Regular expressions, choices and context-free grammars are matched as a whole."""
    _, texts = answers((), text, temperature=1.0)
    assert all(re.fullmatch(pattern, answer) for answer in texts)


def test_a_json_object_is_one_as_far_as_it_goes() -> None:
    """Without a schema the model may go on to the limit, but never off JSON."""
    sequences, texts = answers((), grammar.json_object(), temperature=1.0, max_tokens=60)
    for seq, answer in zip(sequences, texts, strict=True):
        assert answer.startswith("{")
        if seq.finish_reason is FinishReason.STOP:
            assert isinstance(json.loads(answer), dict)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (grammar.json_schema({"type": "frob"}), "frob"),
        (grammar.json_schema({"$ref": "#/$defs/none"}), "/$defs/none"),
        (grammar.json_schema({"type": "string", "pattern": "("}), "unclosed group"),
        (grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 2}), "minimum"),
        (grammar.regex("("), "unclosed group"),
        (grammar.lark("start: nothing"), "nothing"),
        ("no grammar", "grammar"),
    ],
)
def test_wrong_grammars_say_what_is_wrong(text: str, named: str) -> None:
    """The error names the part at fault, in one bounded line, and nothing is queued."""
    engine = make_engine(model=MODEL, tokenizer=TOKENIZER)
    with pytest.raises(InvalidRequest) as caught:
        engine.add(make_sequence("a", [1, 2, 3], grammar=text))
    assert caught.value.param == "grammar"
    assert named in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300
    assert not engine.has_work


def test_half_of_a_surrogate_pair_is_in_no_pattern() -> None:
    """As in other grammars, which are refused when they are compiled."""
    with pytest.raises(InvalidRequest, match="a pattern has half of a surrogate pair"):
        grammar.regex("a\ud800")


def test_a_choice_of_nothing_is_no_grammar() -> None:
    """What it allows would be an empty answer."""
    with pytest.raises(ValueError, match="needs an option"):
        grammar.choice([])


def test_a_text_is_no_choice() -> None:
    """Its characters would be the options."""
    with pytest.raises(ValueError, match="several texts"):
        grammar.choice("yes")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "password"},
        {"type": "array", "items": {"type": "string", "format": "binary"}},
        {"type": "array", "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}},
        {"anyOf": [{"$ref": "#/$defs/path"}], "$defs": {"path": {"format": "path"}}},
        {"type": "object", "properties": {"a": {"properties": {"b": {"format": "regex"}}}}},
    ],
)
def test_what_forbids_nothing_is_left_out_of_a_schema(schema: dict[str, Any]) -> None:
    """Formats that nobody knows are notes, as JSON Schema has it; generators of schemas write
    these (pydantic, OpenAPI, Zod), and tools of agents have them."""
    GRAMMARS.check(grammar.json_schema(schema))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        (
            {"properties": {"a": {"propertyNames": {"maxLength": 3}}}},
            "properties.a.propertyNames",
        ),
    ],
)
def test_what_cannot_be_held_is_refused(schema: dict[str, Any], path: str) -> None:
    """Where nobody has said that less will do, as in offline use; the error says where it is."""
    with pytest.raises(ValueError, match=f"cannot be enforced: {path}$"):
        grammar.json_schema(schema)


@pytest.mark.parametrize(
    "text",
    [
        '{"grammars": [{"lark_grammar": 5, "hdserve_marks": 7}]}',
        '{"grammars": [{"lark_grammar": 5, "hdserve_marks": {"A": "a"}}]}',
        '{"grammars": [{"lark_grammar": "start: A", "hdserve_marks": {"A": 5}}]}',
        '{"grammars": [{"hdserve_marks": {"A": "a"}}]}',
        '{"grammars": [{"lark_grammar": "start: A", "hdserve_marks": {}, "hdserve_thoughts": 5}]}',
        '{"grammars": [{"lark_grammar": "", "hdserve_marks": {}, "hdserve_thoughts": {"A": []}}]}',
        '{"grammars": [{"lark_grammar": "", "hdserve_marks": {}, "hdserve_thoughts": {"A": [5]}}]}',
        '{"grammars": [{"hdserve_thoughts": {"A": ["a"]}}, {"hdserve_marks": {}}]}',
        '{"grammars": ["hdserve_marks"]}',
        '["hdserve_marks"]',
        '["<end>"]',
        '{"grammars": {"<end>": 5}}',
        '"hdserve_marks"' + "[" * 100_000,
        "[" * 100_000 + '"hdserve_marks"',
    ],
    ids=range(14),
)
def test_grammars_that_nothing_here_makes_are_refused(text: str) -> None:
    """Whoever wrote them; with no error of what reads them."""
    with pytest.raises(InvalidRequest) as caught:
        GRAMMARS.check(text)
    assert caught.value.param == "grammar"


def test_a_panic_of_the_library_is_told_without_its_trace() -> None:
    error = "panic: assertion failed: self.is_ok()\n   0: std::backtrace\n   1: at src/lib.rs:5"
    matcher: Any = SimpleNamespace(get_error=lambda: error)
    assert _reason(matcher) == "it cannot be compiled"


def test_a_grammar_without_any_text_is_refused() -> None:
    """Not only when the first token is to be chosen."""
    with pytest.raises(InvalidRequest, match="the grammar cannot be used"):
        GRAMMARS.check(grammar.json_schema({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"required": 5}, "Expected array for 'required', got 5"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "string", "pattern": "("}, "regex parse error: ( ^ error: unclosed group"),
    ],
)
def test_a_reason_has_none_of_the_rules_that_a_schema_is_held_by(
    schema: dict[str, Any], reason: str
) -> None:
    """It is the same alone and among the calls of tools, whose rules no client has written."""
    rules = f'start: "<" json\njson: %json {json.dumps(schema)}\n'
    for form in (grammar.json_schema(schema), grammar.lark(rules)):
        with pytest.raises(InvalidRequest) as caught:
            GRAMMARS.check(form)
        assert caught.value.message == f"the grammar cannot be used: {reason}"


@pytest.mark.parametrize("name", sorted(HELD_FORMATS))
def test_known_formats_are_held(name: str) -> None:
    """None of them allows an empty text."""
    state = GRAMMARS.state(grammar.json_schema({"type": "string", "format": name}))
    for token_id in b'""':
        state.push(token_id)
    assert state.error is not None


def test_names_and_values_are_no_schemas() -> None:
    """A property may be called ``format``, and a constant may look like a schema."""
    value = {"format": "frob", "uniqueItems": False}
    schema = {
        "type": "object",
        "properties": {"format": {"const": value}, "uniqueItems": {"enum": [value]}},
        "required": ["format", "uniqueItems"],
        "additionalProperties": False,
    }
    held = json.loads(grammar.json_schema(schema))["grammars"][0]["json_schema"]
    assert held.pop("x-guidance")
    assert held == schema


@pytest.mark.parametrize("options", [{"lenient": True}, {"whitespace_pattern": "!*"}, {"x": 3}, 5])
def test_a_schema_has_no_options_of_its_own(options: Any) -> None:
    """By which less of it could be held; a property may be called like them."""
    schema = {
        "properties": {"x-guidance": {"type": "integer", "x-guidance": options}},
        "additionalProperties": False,
    }
    plain = {
        "properties": {"x-guidance": {"type": "integer"}},
        "additionalProperties": False,
    }
    text = grammar.json_schema({**schema, "x-guidance": options})
    assert text == grammar.json_schema(plain)
    held = json.loads(text)["grammars"][0]["json_schema"]
    assert held["properties"] == plain["properties"]
    with pytest.raises(ValueError, match=r"cannot be enforced: not$"):
        grammar.json_schema({"not": {}, "x-guidance": options})


def test_deep_schemas_are_refused() -> None:
    """Nesting beyond what the library reads is an error of the request."""
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest):
        GRAMMARS.check(grammar.json_schema(schema))
    for _ in range(200_000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="too deep"):
        grammar.json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [0.5] * 100_001},
        {"properties": {"a": {"required": ["a"] * 60_000}, "b": {"const": [None] * 60_000}}},
    ],
    ids=["in one list", "together"],
)
def test_schemas_of_too_many_values_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="more than 100000 values"):
        grammar.json_schema(schema)


def multiples_of(*divisors: float) -> dict[str, Any]:
    """An object whose numbers are multiples of one of these each."""
    parts = {f"n{index}": {"multipleOf": divisor} for index, divisor in enumerate(divisors)}
    return {"type": "object", "properties": parts}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 300_023},
        {"type": "number", "multipleOf": 300.023},
        {"type": "integer", "multipleOf": 10**5000},
        {"type": "integer", "allOf": [{"multipleOf": 601}, {"multipleOf": 503}]},
        multiples_of(*range(9_900, 9_920)),
        {"$defs": {"a": multiples_of(1e300)}, "$ref": "#/$defs/a"},
        {"properties": {"multipleOf": multiples_of(999_983)}},
    ],
    ids=["large", "with a point", "huge", "both", "many", "referred to", "below its own name"],
)
def test_multiples_of_too_much_are_refused(schema: dict[str, Any]) -> None:
    """A grammar has a state for each number below the divisor."""
    with pytest.raises(ValueError, match="multipleOf"):
        grammar.json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 10_000},
        multiples_of(*[5, 10, 0.5, 1e-7] * 25),
        {"properties": {"multipleOf": {"type": "integer"}}, "enum": [{"multipleOf": "x"}]},
    ],
    ids=["cents", "large", "many", "a name"],
)
def test_multiples_of_common_numbers_are_held(schema: dict[str, Any]) -> None:
    assert json.loads(grammar.json_schema(schema))["grammars"]


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"enum": ["a", -(2**53) - 1]},
        {"const": {"a": [{"b": 2**60 + 1}]}},
        {"const": 2**64},
        {"const": 10**400},
        {"const": 123456789.12345679},
        {"type": "integer", "minimum": 2**53 + 1},
        {"type": "integer", "maximum": 2**64 - 1},
        {"type": "integer", "exclusiveMinimum": 2**53},
        {"type": "integer", "exclusiveMaximum": -(2**53)},
        {"type": "integer", "exclusiveMaximum": 1e18},
        {"$defs": {"a": {"items": {"enum": [2**53 + 1]}}}, "$ref": "#/$defs/a"},
        {"properties": {"enum": {"maximum": 2**53 + 1}}},
    ],
    ids=str,
)
def test_numbers_that_would_become_others_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a number has more digits than can be held"):
        grammar.json_schema(schema)


@pytest.mark.parametrize(
    "number", [0, -1, 2**53, 2**53 + 2, -(2**53), 2**63 - 1, 0.1, 1e-7, -1.5e-9, 0.1 + 0.2]
)
def test_numbers_are_held(number: float) -> None:
    """A constant is written as the number it is."""
    _, texts = answers((), grammar.json_schema({"const": number}))
    assert [json.loads(text) for text in texts] == [number] * 4


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 1 - 2**53, "maximum": 2**53 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        {"type": "integer", "exclusiveMaximum": 2**53},
        {"type": "number", "exclusiveMinimum": 123456789.1},
        {"properties": {"const": {"type": "integer"}, "maximum": {"default": 2**53 + 1}}},
    ],
    ids=str,
)
def test_bounds_of_common_numbers_are_held(schema: dict[str, Any]) -> None:
    GRAMMARS.check(grammar.json_schema(schema))


def test_a_grammar_that_would_take_hours_to_compile_is_refused() -> None:
    """Once; what everybody else asks for is compiled after it."""
    patterns = [{"type": "string", "pattern": f".*{letter}.*"} for letter in ascii_lowercase]
    text = grammar.json_schema({"type": "object", "properties": {"a": {"allOf": patterns}}})
    grammars = Grammars(TOKENIZER, 260, {256})
    with pytest.raises(InvalidRequest, match="too complex: it takes over 2 s to compile"):
        grammars.check(text)
    assert grammars.is_known(text)
    with pytest.raises(InvalidRequest, match="too complex"):
        grammars.state(text)
    grammars.check(grammar.json_object())


def large_grammar(number: int) -> str:
    """One of 0.8 MB that takes 80 MB when it is compiled."""
    draw = random.Random(number)
    texts = ("".join(draw.choices(ascii_lowercase[:16], k=40)) for _ in range(20_000))
    return grammar.regex(f"{number}({'|'.join(texts)})")


def test_grammars_are_kept_as_long_as_their_memory_allows() -> None:
    grammars = Grammars(TOKENIZER, 260, {256})
    small, *large = grammar.regex("a"), *map(large_grammar, range(4))
    for text in (small, *large):
        grammars.check(text)
        assert grammars.is_known(text)
    assert not grammars.is_known(small)
    assert not grammars.is_known(large[0])
    grammars.check(grammar.regex("b"))
    assert grammars.is_known(large[-1])


def test_grammars_of_running_texts_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one has to wait; those that are known, and those that only were kept, do not."""
    monkeypatch.setattr(grammar_module, "_MAX_HELD_BYTES", 2**26)
    grammars = Grammars(TOKENIZER, 260, {256})
    small, texts = grammar.regex("a"), [large_grammar(number) for number in range(2)]
    grammars.check(small)
    running = grammars.state(texts[0])
    with pytest.raises(GrammarsOverloaded, match="take too much memory"):
        grammars.check(texts[1])
    assert not grammars.state(texts[0]).is_complete
    grammars.check(small)
    del running
    grammars.check(texts[1])


def test_a_grammar_that_needs_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_KEPT_BYTES", 2**25)
    grammars = Grammars(TOKENIZER, 260, {256})
    with pytest.raises(InvalidRequest, match="too complex: it takes over 32 MB"):
        grammars.check(large_grammar(0))
    grammars.check(grammar.regex("a"))


def test_a_grammar_that_fails_ends_its_sequence_alone() -> None:
    """A grammar that turns out to need too much time is the error of its own sequence."""
    exploding = grammar.regex("(a|b)*a(a|b){40}")
    grammars = Grammars(TOKENIZER, 260, {256}, step_fuel=200)
    other = make_sequence("other", [5, 6, 7], temperature=0.0, ignore_eos=True)
    failing = make_sequence("failing", [5, 6, 7], grammar=exploding)
    engine = make_engine(model=MODEL, tokenizer=TOKENIZER, grammars=grammars)
    outputs = run(engine, [failing, other])
    assert failing.finish_reason is FinishReason.ERROR
    (error,) = [output.error for output in outputs if output.error is not None]
    assert isinstance(error, InvalidRequest)
    assert "too complex" in error.message
    assert other.num_output_tokens > failing.num_output_tokens
    assert other.finish_reason is not FinishReason.ERROR


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_grammar_that_fails_where_the_model_makes_no_numbers_ends_its_sequence_alone(
    logprobs: int | None,
) -> None:
    """Both behind the first token."""
    grammars = Grammars(TOKENIZER, 260, {256}, step_fuel=1)
    model, first = make_byte_model(), ord("a")
    with torch.no_grad():
        model.get_input_embeddings().weight[first] = float("nan")
    text = grammar.regex("(a|b)*a(a|b){40}")
    params = {"grammar": text, "logit_bias": {first: 100.0}, "logprobs": logprobs}
    failing = make_sequence("failing", [5, 6, 7], **params)
    others = {"temperature": 0.0, "logit_bias": {first: -100.0}, "ignore_eos": True}
    other = make_sequence("other", [5, 6, 8], **others, max_tokens=4)
    run(make_engine(model=model, tokenizer=TOKENIZER, grammars=grammars), [failing, other])
    assert failing.finish_reason is FinishReason.ERROR
    assert failing.num_output_tokens == 1
    assert other.num_output_tokens == 4


def test_texts_go_on_where_the_lexer_is_full() -> None:
    """Each needs a few hundred states, all of them together more than there may be: those that run
    then go on in a grammar that is compiled anew, with the same masks, and share that one."""
    grammars = Grammars(TOKENIZER, 260, {256})
    text = grammar.regex("(a|b)*a(a|b){18}")
    logits = torch.zeros(1, 260)
    draw = random.Random(5)

    def follow(state: GrammarState, num_tokens: int) -> GrammarState:
        for token_id in draw.choices(b"ab", k=num_tokens):
            state.push(token_id)
            state.apply(logits)
        return state

    running = [follow(grammars.state(text), 60) for _ in range(3)]
    begun = running[0]._compiled
    others = (follow(grammars.state(text), 120) for _ in range(300))
    assert any(state._compiled is not begun for state in others)
    for state in running:
        assert follow(state, 120).error is None
        fresh = Grammars(TOKENIZER, 260, {256}).state(text)
        for token_id in state._token_ids:
            fresh.push(token_id)
        assert torch.equal(fresh.apply(logits), state.apply(logits))
    (renewed,) = {state._compiled for state in running}
    assert renewed is not begun
    assert grammars.state(text)._compiled is renewed


def test_a_long_text_goes_on_a_few_times() -> None:
    """One that fills a lexer alone is read through again, so there is an end of it."""
    state = Grammars(TOKENIZER, 260, {256}).state(grammar.regex("(a|b)*a(a|b){18}"))
    begun, logits = state._compiled, torch.zeros(1, 260)
    num_tokens = 0
    for token_id in random.Random(5).choices(b"ab", k=30_000):
        state.push(token_id)
        if len(state._token_ids) % 3 == 0:
            state.apply(logits)
        if state.error is not None:
            break
        num_tokens += state._compiled is not begun
    assert num_tokens > 1000
    assert state.error is not None
    assert "too many states" in state.error.message


@pytest.mark.parametrize("text", [grammar.regex(""), grammar.choice([""]), grammar.regex("a?")])
def test_a_text_may_end_before_it_begins(text: str) -> None:
    grammars = Grammars(TOKENIZER, 260, {256})
    assert grammars.state(text).error is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_fails_before_the_minimum_says_why(temperature: float) -> None:
    """It allows nothing but the end then, which may not come yet."""
    grammars = Grammars(TOKENIZER, 260, {256}, step_fuel=50)
    exploding = grammar.regex("(a|b)*a(a|b){40}")
    options: dict[str, Any] = {"temperature": temperature, "min_tokens": 5, "max_tokens": 200}
    failing = make_sequence("failing", [5, 6, 7], grammar=exploding, **options)
    outputs = run(make_engine(model=MODEL, tokenizer=TOKENIZER, grammars=grammars), [failing])
    (error,) = [output.error for output in outputs if output.error is not None]
    assert isinstance(error, InvalidRequest)
    assert "too complex" in error.message


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_wins_over_the_minimum(temperature: float) -> None:
    """Where it allows nothing but tokens that may not come before ``min_tokens``, they come; what
    the answer is does not change."""
    options: dict[str, Any] = {"temperature": temperature, "min_tokens": 20}
    for stop_token_ids in ((), tuple(b"yn"), tuple(range(256))):
        sequences, texts = answers(
            (), grammar.choice(["yes", "no"]), stop_token_ids=stop_token_ids, **options
        )
        assert set(texts) <= {"yes", "no"}
        assert {seq.finish_reason for seq in sequences} == {FinishReason.STOP}
    for text in ("", "yes"):
        sequences, texts = answers((), grammar.choice([text]), skip_special_tokens=False, **options)
        assert set(texts) == {text}
        assert {seq.finish_reason for seq in sequences} == {FinishReason.STOP}


def test_what_the_model_breaks_is_no_fault_of_the_grammar() -> None:
    """Logits that are no numbers end the sequence with an error that is not the client's."""
    model = make_byte_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    seq = make_sequence("a", [5, 7], grammar=grammar.choice(["yes", "no"]), min_tokens=2)
    other = make_sequence("b", [5, 6], grammar=grammar.choice(["yes", "no"]))
    outputs = run(make_engine(model=model, tokenizer=TOKENIZER), [seq, other])
    assert (seq.finish_reason, other.finish_reason) == (FinishReason.ERROR, FinishReason.STOP)
    (error,) = [output.error for output in outputs if output.error is not None]
    assert isinstance(error, HdserveError)
    assert not isinstance(error, InvalidRequest)


def test_masks_are_of_the_model() -> None:
    """A mask has the model's width, also where that is more than the tokenizer's."""
    grammars = Grammars(TOKENIZER, 260 + 37, {2})
    state = grammars.state(grammar.choice(["a"]))
    masked = state.apply(torch.zeros(1, 260 + 37))
    allowed = masked.isfinite().nonzero()[:, 1].tolist()
    assert [TOKENIZER.token_text(token_id) for token_id in allowed] == ["a"]
    state.push(allowed[0])
    assert state.is_complete
    assert state.error is None


def test_engines_without_text_have_no_grammars() -> None:
    """Token ids alone cannot be held to a grammar."""
    with pytest.raises(InvalidRequest, match="tokenizer"):
        make_engine().add(make_sequence("a", make_prompt(3), grammar=grammar.json_object()))


def test_marks_are_special_tokens_where_there_are_such() -> None:
    """No literal of a grammar is one; a vocabulary without them spells them out."""
    tokenizer = make_tokenizer()
    tokenizer.backend.add_special_tokens(["[CALL]"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend))
    text = grammar.either(
        grammar.lark('start: mark "x"', {"mark": "[CALL]"}), grammar.choice(["a", "b"])
    )
    for own, output in ((tokenizer, [257, ord("x")]), (make_tokenizer(), [*b"[CALL]x"])):
        state = Grammars(own, own.vocab_size, {256}).state(text)
        for token_id in [*output, 256]:
            logits = torch.zeros(1, own.vocab_size)
            assert torch.isfinite(state.apply(logits)[0, token_id])
            state.push(token_id)
        assert state.error is None
        assert state.is_complete


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (grammar.choice(["a <end> x", "b"]), "a <end> x"),
        (grammar.regex(r"<\|é\|> x?"), "<|é|> x"),
        (grammar.json_schema({"const": "<|é|>"}), '"<|é|>"'),
        (grammar.either(grammar.json_schema({"const": "<end>"}), grammar.choice(["b"])), '"<end>"'),
    ],
    ids=["choice", "regex", "schema", "either"],
)
def test_texts_that_spell_special_tokens(form: str, text: str) -> None:
    """They are written as other texts are, also where nothing else is allowed."""
    tokenizer = make_tokenizer()
    tokenizer.backend.add_special_tokens(["<|é|>"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend))
    state = Grammars(tokenizer, 260, {256}).state(form)
    for token_id in text.encode():
        assert state.apply(torch.zeros(1, 260)).isfinite()[0, token_id]
        state.push(token_id)
        assert state.error is None
    assert state.apply(torch.zeros(1, 260)).isfinite()[0, 256]


@pytest.mark.parametrize(
    "form",
    [
        grammar.choice(["a [TOOL] x"]),
        grammar.lark('start: "a " mark " x"', {"mark": "[TOOL]"}),
    ],
    ids=["choice", "mark"],
)
def test_texts_that_spell_tokens_the_model_lacks(form: str) -> None:
    """They are written in other tokens, with drafts and without."""
    tokenizer = make_wide_tokenizer()
    for drafters in ((), [JunkDrafter(260)]):
        seq = make_sequence("a", PROMPT, grammar=form)
        outputs = run(make_engine(drafters, model=MODEL, tokenizer=tokenizer), [seq])
        assert "".join(output.text for output in outputs) == "a [TOOL] x"
        assert seq.finish_reason is FinishReason.STOP


def test_a_token_that_the_model_lacks_fails_one_answer() -> None:
    """Where a grammar allows nothing else, there is no draft of it that ends the engine."""
    forced = make_sequence("forced", PROMPT, grammar=grammar.regex(r"a \[TOO[L]\] x"))
    other = make_sequence("other", PROMPT, grammar=grammar.choice(["yes", "no"]))
    engine = make_engine([JunkDrafter(260)], model=MODEL, tokenizer=make_wide_tokenizer())
    run(engine, [forced, other])
    assert forced.finish_reason is FinishReason.ERROR
    assert forced.output_token_ids == [*b"a "]
    assert other.finish_reason is FinishReason.STOP

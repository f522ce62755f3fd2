"""The channels of gpt-oss are told apart, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from deployments.parsers.harmony_parser import HarmonyParser
from deployments.parsers.reasoning_parser import Split
from deployments.parsers.tool_parser import Function
from deployments.parsers.tool_parsers import HarmonyToolParser
from hdserve import grammar
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.tokenization.tokenizer import Tokenizer, load_tokenizer
from tests.deployments.parsers.calls import ToolCall, joined

ANALYSIS = "<|channel|>analysis<|message|>Two and two.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Four."
EMPTY = "<|start|>assistant<|channel|>commentary<|message|>"
CALL = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
CASES: list[tuple[bool, str, str, str]] = [
    (False, f"{ANALYSIS}{FINAL}", "Two and two.", "Four."),
    (False, f"{ANALYSIS}{FINAL}<|return|>", "Two and two.", "Four."),
    (True, f" Hm.<|end|>{FINAL}", " Hm.", "Four."),
    (False, "<|channel|>final<|message|>1 < 2 <|en", "", "1 < 2 <|en"),
    (False, "<|channel|>analysis<|message|>Two", "Two", ""),
    (False, f"{ANALYSIS}<|start|>assistant<|channel|>analysis<|message|>a", "Two and two.\na", ""),
    (False, f"{ANALYSIS}<|channel|>final<|message|>a", "Two and two.", "a"),
    (
        False,
        f"<|channel|>commentary<|message|>Let me see.<|end|>{ANALYSIS}{FINAL}",
        "Two and two.",
        "Let me see.\nFour.",
    ),
    # A message that says nothing has no line, whether or not another one follows.
    (False, f"{FINAL}<|end|>{EMPTY}<|end|>{FINAL}", "", "Four.\nFour."),
    (False, f"{FINAL}<|end|>{EMPTY}", "", "Four."),
    (False, f"{FINAL}<|end|>{EMPTY}<|end|><|start|>assistant{CALL}", "", f"Four.{CALL}"),
    # A header that is cut off is nothing, and what is no header is text.
    (False, f"{ANALYSIS}<|start|>assistant<|channel|>fin", "Two and two.", ""),
    (False, "<|chan", "", "<|chan"),
    (False, "Four.", "", "Four."),
    (False, '{"a": 1}', "", '{"a": 1}'),
    (False, "", "", ""),
    (False, f"<|channel|>{'x' * 300}", "", "x" * 300),
    (False, f'{ANALYSIS}<|start|>assistant{{"a": 1}}', "Two and two.", '{"a": 1}'),
    # Calls, of which there are two ways to write.
    (False, f"{ANALYSIS}<|start|>assistant{CALL}", "Two and two.", CALL),
    (
        False,
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        "<|message|>{}",
        "Two and two.",
        CALL.removesuffix("<|call|>"),
    ),
    (
        False,
        f"{ANALYSIS}<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{}}"
        "<|end|>",
        "Two and two.",
        CALL,
    ),
    (False, " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", CALL),
    (False, "<|channel|>analysis to=python<|message|>1+1<|call|>", "1+1", ""),
]


def read(is_open: bool, pieces: list[str]) -> tuple[str, str]:
    parser = HarmonyParser(is_open=is_open)
    found: list[Split] = [*map(parser.push, pieces), parser.finish()]
    return "".join(part.reasoning for part in found), "".join(part.text for part in found)


@pytest.mark.parametrize(("is_open", "text", "reasoning", "said"), CASES)
def test_channels_are_read(is_open: bool, text: str, reasoning: str, said: str) -> None:
    """In one piece, in pieces of three, and letter by letter."""
    for size in (1, 3, 1000):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(is_open, pieces) == (reasoning, said)


TEXTS = st.lists(
    st.sampled_from(
        [
            *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
            *(
                "assistant",
                "analysis",
                "final",
                " to=functions.f",
                "<",
                "<|",
                "{}",
                "a",
                " ",
                "é",
                "x" * 250,
            ),
        ]
    ),
    max_size=14,
).map("".join)


@given(is_open=st.booleans(), text=TEXTS, size=st.integers(1, 12))
def test_cuts_change_nothing(is_open: bool, text: str, size: int) -> None:
    """A stream gives what the whole answer gives."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(is_open, pieces) == read(is_open, [text])


def test_tokens_of_reasoning() -> None:
    """It is over with the mark behind it, and may come again."""
    parser = HarmonyParser(is_open=False)
    assert not parser.is_over
    parser.push("<|channel|>analysis<|message|>a")
    assert (parser.is_over, parser.has_reasoned) == (False, True)
    parser.push("<|end|>")
    assert parser.is_over
    parser.push("<|start|>assistant<|channel|>analysis<|message|>")
    assert not parser.is_over


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_reach_their_parser(size: int) -> None:
    """Without what was thought before them."""
    text = (
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}'
    )
    reasoning = HarmonyParser(is_open=False)
    calls = HarmonyToolParser()
    parts = []
    for start in range(0, len(text), size):
        parts += calls.push(reasoning.push(text[start : start + size]).text)
    parts += [*calls.push(reasoning.finish().text), *calls.finish()]
    assert joined(parts) == ("Wait.", [ToolCall("f", '{"a":1}')])


MARKS = ("start", "channel", "message", "constrain", "end", "return", "call")
ANSWER = grammar.json_schema({"properties": {"a": {"type": "integer"}}, "required": ["a"]})
HELD_CALLS = HarmonyToolParser.grammar([Function("f", {"type": "object"})], is_one=True)
HELD_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
FORMS: dict[str, tuple[str, list[str]]] = {
    "schema": (ANSWER, ["<|channel|>final<|message|>"]),
    "typed": (ANSWER, ["<|channel|>final <|constrain|>json<|message|>"]),
    "call": (HELD_CALLS, [""]),
    "schema or call": (grammar.either(HELD_CALLS, ANSWER), ["", "<|channel|>final<|message|>"]),
}


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "texts"])
def known(request: pytest.FixtureRequest) -> tuple[Tokenizer, Grammars]:
    """A tokenizer that has the marks as tokens, and one that has not."""
    backend = load_tokenizer("hdserve-mini").backend
    if request.param:
        backend.add_special_tokens([f"<|{name}|>" for name in MARKS])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    return tokenizer, Grammars(tokenizer, tokenizer.vocab_size, {2})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("is_open", [True, False])
def test_what_a_grammar_holds_is_what_is_read(
    form: str, number: int, is_open: bool, known: tuple[Tokenizer, Grammars]
) -> None:
    """Messages of reasoning, if there are some, then an answer with the header of its channel, or
    a call with its own."""
    tokenizer, grammars = known
    answer, headers = FORMS[form]
    text = HarmonyParser.grammar(answer, is_open=is_open)
    next_message = "<|end|><|start|>assistant"
    thoughts = f"{ANALYSIS}<|start|>assistant" * number
    before = f"So {{}}{next_message}{thoughts}" if is_open else thoughts

    def allows(written: str) -> bool:
        state = grammars.state(text)
        for token_id in [*tokenizer.encode(written, adds_special_tokens=False), 2]:
            state.push(token_id)
        return state.error is None and state.is_complete

    said, wrong = (HELD_CALL, "{}") if form == "call" else ('{"a": 1}', '{"b": 1}')
    for header in headers:
        assert allows(f"{before}{header}{said}")
        assert not allows(f"{before}{header}{wrong}")
        assert allows(f"{header}{said}") is not is_open
        wanted = CALL.removesuffix("<|call|>") if form == "call" else said
        reasoning = ["So {}"] * is_open + ["Two and two."] * number
        assert read(is_open, [f"{before}{header}{said}"]) == ("\n".join(reasoning), wanted)
    assert not allows(f"{before}<|channel|>analysis<|message|>Hm.")
    assert not allows(f"{before}<|channel|>commentary<|message|>Hm.{next_message}{said}")

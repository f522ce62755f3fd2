"""What a model thinks is told from what it says, however the text is cut into pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from deployments.parsers.reasoning_parser import Split
from deployments.parsers.reasoning_parsers import (
    GemmaThinkParser,
    MistralThinkParser,
    ThinkParser,
)
from hdserve import grammar
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.tokenization.tokenizer import Tokenizer, load_tokenizer

CLOSED: list[tuple[str, str, str]] = [
    ("<think>\nTwo and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    (" \n<think>a</think>b", "a", "b"),
    ("<think>a", "a", ""),
    ("<think>", "", ""),
    ("<think>\n\n</think>\n\nFour.\n", "", "Four.\n"),
    ("<think>a </think>", "a", ""),
    ("<think>a\n</think>\n", "a", ""),
    # Only at the start, and only once.
    ("No <think>a</think>", "", "No <think>a</think>"),
    ("<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
    ("<think>a <think>b</think>c</think>", "a <think>b", "c</think>"),
    ("a</think>b", "", "a</think>b"),
    # What never becomes a mark is text.
    ("<", "", "<"),
    (" <thin", "", " <thin"),
    ("<thinking>a", "", "<thinking>a"),
    ("< think>a", "", "< think>a"),
    ("<think>if a </ b", "if a </ b", ""),
    ("<think>a \n</thin", "a \n</thin", ""),
    ("<think>a<</think>b", "a<", "b"),
    ("<think> \n", "", ""),
    ("", "", ""),
    (" ", "", " "),
]
OPEN: list[tuple[str, str, str]] = [
    ("Two and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    ("\n a</think>b", "a", "b"),
    ("</think>b", "", "b"),
    # Some templates open it and some models open it again.
    ("\n<think>\na</think>b", "a", "b"),
    ("a", "a", ""),
    ("<thin", "<thin", ""),
    (" \n", "", ""),
    ("", "", ""),
]
CASES = [*((False, *case) for case in CLOSED), *((True, *case) for case in OPEN)]


def read(is_open: bool, pieces: list[str]) -> tuple[list[Split], ThinkParser]:
    parser = ThinkParser(is_open=is_open)
    return [*map(parser.push, pieces), parser.finish()], parser


def joined(splits: list[Split]) -> tuple[str, str]:
    return "".join(item.reasoning for item in splits), "".join(item.text for item in splits)


def cut(text: str, cuts: list[int]) -> list[str]:
    ends = [*sorted(at % (len(text) + 1) for at in cuts), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(("is_open", "text", "reasoning", "said"), CASES)
def test_reasoning_is_read(is_open: bool, text: str, reasoning: str, said: str) -> None:
    """In one piece and letter by letter."""
    for pieces in ([text], list(text)):
        splits, parser = read(is_open, pieces)
        assert joined(splits) == (reasoning, said)
        assert parser.has_reasoned == (is_open or text.lstrip().startswith("<think>"))


TEXTS = st.one_of(
    st.sampled_from([text for _, text, _, _ in CASES]),
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a", "é"]),
        max_size=14,
    ).map("".join),
)


@given(is_open=st.booleans(), text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_cuts_change_nothing(is_open: bool, text: str, cuts: list[int]) -> None:
    """A stream gives what the whole answer gives, and nothing comes twice or too late: text never
    before reasoning, no part of the mark between them."""
    pieces = cut(text, cuts)
    assert "".join(pieces) == text
    splits, _ = read(is_open, pieces)
    reasoning, said = joined(splits)
    assert (reasoning, said) == joined(read(is_open, [text])[0])
    assert "</think>" not in reasoning
    kinds = [kind for split in splits for kind in (split.reasoning and "r", split.text and "t")]
    assert sorted(filter(None, kinds)) == list(filter(None, kinds))


@given(is_open=st.booleans(), reasoning=st.text(max_size=30), said=st.text(max_size=30))
def test_what_was_written_is_read(is_open: bool, reasoning: str, said: str) -> None:
    """Any reasoning and any text, but for the white space next to marks."""
    if "</think>" in reasoning or reasoning.lstrip().startswith("<think>"):
        return
    written = f"{'' if is_open else '<think>'}{reasoning}</think>{said}"
    found: Any = joined(read(is_open, list(written))[0])
    assert found == (reasoning.strip(), said.lstrip())


def test_text_is_not_held_back() -> None:
    """What can be no mark comes at once."""
    parser = ThinkParser(is_open=True)
    assert parser.push("Let me see") == ("Let me see", "")
    assert parser.push(". </thi") == (".", "")
    assert parser.push("s>") == (" </this>", "")
    assert not parser.is_over
    assert parser.push("</think>") == ("", "")
    assert parser.is_over
    assert parser.push(" It is") == ("", "It is")
    assert parser.push(" <") == ("", " <")


def test_marks_of_mistral() -> None:
    """Are read in the same way."""
    parser = MistralThinkParser(is_open=False)
    assert parser.push("[THINK]Two and two.[/THI") == ("Two and two.", "")
    assert parser.push("NK]Four.") == ("", "Four.")


def test_marks_of_gemma() -> None:
    """Are read in the same way, also around nothing."""
    parser = GemmaThinkParser(is_open=False)
    assert parser.push("<|channel>tho") == ("", "")
    assert parser.push("ught\nTwo and two.\n<channel") == ("Two and two.", "")
    assert parser.push("|>Four.") == ("", "Four.")
    parser = GemmaThinkParser(is_open=False)
    assert parser.push("<|channel>thought\n<channel|>Four.") == ("", "Four.")


MARKS = ("[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<think>", "</think>")
ANSWER = grammar.json_schema({"properties": {"a": {"type": "integer"}}, "required": ["a"]})
PARSERS: list[type[ThinkParser]] = [ThinkParser, MistralThinkParser, GemmaThinkParser]


@pytest.fixture(scope="module")
def marked() -> tuple[Tokenizer, Grammars]:
    """A tokenizer that has the marks as tokens."""
    backend = load_tokenizer("hdserve-mini").backend
    backend.add_special_tokens([*MARKS])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    return tokenizer, Grammars(tokenizer, tokenizer.vocab_size, {2})


def allows(tokenizer: Tokenizer, grammars: Grammars, form: str, written: str) -> bool:
    """Whether ``written`` is a whole text of a grammar."""
    state = grammars.state(form)
    for token_id in [*tokenizer.encode(written, adds_special_tokens=False), 2]:
        if state.is_complete and token_id != 2:
            return False
        state.push(token_id)
    return state.error is None and state.is_complete


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("has_tokens", [True, False])
@settings(max_examples=10)
@given(is_open=st.booleans(), thought=st.text(max_size=30), blank=st.sampled_from(["", "\n\n"]))
def test_what_a_grammar_holds_is_what_is_read(
    parser: type[ThinkParser],
    has_tokens: bool,
    marked: tuple[Tokenizer, Grammars],
    tokenizer: Tokenizer,
    grammars: Grammars,
    is_open: bool,
    thought: str,
    blank: str,
) -> None:
    """Behind any reasoning, whether or not the marks are tokens; without an open one, the answer
    may be there alone."""
    if parser.CLOSE in thought or thought.lstrip().startswith(parser.OPEN):
        return
    of = marked if has_tokens else (tokenizer, grammars)
    form = parser.grammar(ANSWER, is_open=is_open)
    opening = "" if is_open else f"{parser.OPEN}\n"
    before = f"{opening}{thought}{parser.CLOSE}{blank}"
    assert allows(*of, form, f'{before}{{"a": 5}}')
    assert not allows(*of, form, f'{before}{{"b": 5}}')
    assert not allows(*of, form, before)
    assert allows(*of, form, '{"a": 5}') is not is_open
    reader = parser(is_open=is_open)
    splits = [*map(reader.push, f'{before}{{"a": 5}}'), reader.finish()]
    assert joined(splits) == (thought.strip(), '{"a": 5}')

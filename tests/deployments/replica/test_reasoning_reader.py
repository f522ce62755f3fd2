"""Reasoning in what sequences are given: whose, of how many tokens, and where there is none."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.generation import GenerationRequest, Summary
from deployments.openai.responses_events import ResponseEvents
from deployments.openai.responses_protocol import ResponsesBody
from deployments.parsers.reasoning_parsers import HarmonyParser, ThinkParser
from deployments.parsers.tool_parsers import HarmonyToolParser
from deployments.replica.reasoning_reader import ReasoningReaders
from deployments.replica.record_builder import RecordBuilder
from hdserve import grammar
from hdserve.conversation import ChatEnd
from hdserve.core import DraftCounts, FinishReason, SamplingParams, Sequence, Source, StepOutput
from hdserve.engine.tokenization.tokenizer import Tokenizer, load_tokenizer
from hdserve.models import bundled_model_path
from tests.reasoning import with_think_marks

CHAT = GenerationRequest("id", messages=({"role": "user", "content": "hi"},))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("hdserve-tiny")


def sequence(tokenizer: Tokenizer, prompt: str, choice: int = 0) -> Sequence:
    token_ids = tokenizer.encode(prompt, adds_special_tokens=False)
    return Sequence(f"id/0/{choice}", token_ids, SamplingParams())


def output(seq: Sequence, *texts: str, is_last: bool = False) -> StepOutput:
    return StepOutput(
        seq,
        token_ids=(5,) * len(texts),
        sources=(Source.PLAIN,) * len(texts),
        texts=texts,
        finish_reason=FinishReason.LENGTH if is_last else None,
        stop_reason="mark" if is_last else None,
    )


def test_each_choice_has_its_own(tokenizer: Tokenizer) -> None:
    """Records tell reasoning from text, and the summary counts the tokens of all choices, those of
    the marks included."""
    sequences = [sequence(tokenizer, "assistant\n<think>\n", choice) for choice in range(2)]
    readers = ReasoningReaders(ThinkParser, tokenizer).of(CHAT, sequences)
    builder = RecordBuilder(tokenizer, "replica")

    def delta(choice: int, *texts: str, is_last: bool = False) -> tuple[str | None, str]:
        seq = sequences[choice]
        given = output(seq, *texts, is_last=is_last)
        (found,) = builder.deltas([given], readers, includes_sources=True)
        assert found.texts == texts
        return found.reasoning, found.text

    assert delta(0, "Two", " and") == ("Two and", "")
    assert delta(1, "Hm", "\n</th") == ("Hm", "")
    assert delta(0, " two.", "\n</think>", "\n", "Four") == (" two.", "Four")
    assert delta(1, is_last=True) == ("\n</th", "")
    assert delta(0, ".", is_last=True) == ("", ".")
    summary = builder.summary(CHAT, sequences, (), readers.values())
    assert summary.num_reasoning_tokens == 4 + 2


@pytest.mark.parametrize(
    ("begun", "is_open"),
    [
        ("<think>\nLet me", True),
        ("<think>\nWell.\n</think>\n\nSo", False),
        ("<think>a</think>The mark <think> opens", False),
        ("To open it, write <think> and then", False),
        ("So", False),
    ],
)
def test_a_message_that_goes_on_may_be_cut_off_in_thought(
    tokenizer: Tokenizer, begun: str, is_open: bool
) -> None:
    """However long ago the thought began; in a message that has ended it matters to nobody."""
    said = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": begun})
    goes_on = replace(CHAT, messages=said, chat_end=ChatEnd.IN_LAST_MESSAGE)
    seq = sequence(tokenizer, f"assistant\n{begun}")
    builder = RecordBuilder(tokenizer, "replica")
    for request, wanted in ((goes_on, is_open), (replace(CHAT, messages=said), False)):
        readers = ReasoningReaders(ThinkParser, tokenizer).of(request, [seq])
        given = output(seq, " know", "</think>", "Four.", is_last=True)
        (found,) = builder.deltas([given], readers, includes_sources=False)
        assert (found.reasoning == "know") is wanted
        assert (found.text == "Four.") is wanted


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning"),
    [
        ("assistant\n<think>\n", "", ""),
        ("assistant\n", "<think>", ""),
        ("assistant\n", "", None),
        ("assistant\n", "Four.", None),
    ],
)
def test_whether_an_answer_has_begun_to_reason(
    tokenizer: Tokenizer, prompt: str, text: str, reasoning: str | None
) -> None:
    """An answer that ends in the first token is told from one without reasoning."""
    seq = sequence(tokenizer, prompt)
    readers = ReasoningReaders(ThinkParser, tokenizer).of(CHAT, [seq])
    builder = RecordBuilder(tokenizer, "replica")
    (found,) = builder.deltas([output(seq, text, is_last=True)], readers, includes_sources=False)
    assert found.reasoning == reasoning


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("assistant\n<think>", True),
        ("assistant\n<think>\n\n", True),
        ("assistant\n", False),
        ("assistant\n<think>\n\n</think>\n\n", False),
        ("user\n<think>\nassistant\n", False),
    ],
)
def test_where_the_prompt_ends(tokenizer: Tokenizer, prompt: str, is_open: bool) -> None:
    """Behind an opening mark all is reasoning until it is closed; an answer without marks has no
    token of it."""
    seq = sequence(tokenizer, prompt)
    (reader,) = ReasoningReaders(ThinkParser, tokenizer).of(CHAT, [seq]).values()
    (split,) = reader.read(output(seq, "a", "b", is_last=True))
    assert split == (("ab", "") if is_open else ("", "ab"))
    assert reader.num_tokens == (2 if is_open else 0)


def test_where_nothing_is_told_apart(tokenizer: Tokenizer) -> None:
    """Without a parser, in a plain completion, and under a grammar."""
    seq = sequence(tokenizer, "<think>")
    readers = ReasoningReaders(ThinkParser, tokenizer)
    assert ReasoningReaders(None, tokenizer).of(CHAT, [seq]) == {}
    assert readers.of(GenerationRequest("id", prompts=("<think>",)), [seq]) == {}
    held = GenerationRequest("id", messages=CHAT.messages, sampling={"grammar": "g"})
    assert readers.of(held, [seq]) == {}
    builder = RecordBuilder(tokenizer, "x")
    (given,) = builder.deltas([output(seq, "a</think>")], {}, includes_sources=False)
    assert (given.reasoning, given.text) == (None, "a</think>")
    summary = builder.summary(held, [seq], ())
    assert summary.num_reasoning_tokens is None


HARMONY = (
    *("<|channel|>", "analysis", "<|message|>", "A", " b", "<|end|>"),
    *("<|start|>", "assistant", "<|channel|>", "commentary", "<|message|>", "C", " d", "<|end|>"),
    *("<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>", "E", "<|end|>"),
    *("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "F", " g"),
)
"""The texts of tokens."""


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 14, len(HARMONY)])
def test_the_order_of_the_answer_is_kept(tokenizer: Tokenizer, size: int) -> None:
    """However many tokens a step gives: the items of a response are those the model wrote, and no
    token is told twice."""
    seq = sequence(tokenizer, "assistant\n")
    readers = ReasoningReaders(HarmonyParser, tokenizer).of(CHAT, [seq])
    starts = range(0, len(HARMONY), size)
    outputs = [output(seq, *HARMONY[at : at + size], is_last=at == starts[-1]) for at in starts]
    deltas = RecordBuilder(tokenizer, "replica").deltas(outputs, readers, includes_sources=True)
    assert [text for delta in deltas for text in delta.texts or ()] == [*HARMONY]
    assert all(delta.texts is not None for delta in deltas)
    assert sum(len(delta.token_ids) for delta in deltas) == len(HARMONY)
    assert [delta.finish_reason for delta in deltas] == [*[None] * (len(deltas) - 1), "length"]
    assert [delta.stop_reason for delta in deltas] == [*[None] * (len(deltas) - 1), "mark"]
    answer = ResponseEvents(ResponsesBody.parse({"model": "m", "input": "hi"}), "r", None)
    for delta in deltas:
        answer.collect(delta)
    items = answer.whole(Summary(1, len(HARMONY), DraftCounts(), "replica"))["output"]
    assert [(item["type"], item["content"][0]["text"]) for item in items] == [
        ("reasoning", "A b"),
        ("message", "C d"),
        ("reasoning", "E"),
        ("message", "F g"),
    ]


CALL = (
    *("<|channel|>", "commentary", " to=functions.f", " <|constrain|>json", "<|message|>"),
    *('{"a":', "1}", "<|call|>"),
)
TOOL = {"type": "function", "name": "f"}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("asked", [{}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL]}])
def test_a_call_where_there_are_no_tools_is_text(
    tokenizer: Tokenizer, asked: dict[str, Any], size: int
) -> None:
    """It has no marks, since nothing reads them; where there are tools, it is a call."""
    body = ResponsesBody.parse({"model": "m", "input": "hi", **asked})
    chat = body.to_chat()
    request = chat.to_generation("id", HarmonyToolParser)
    seq = sequence(tokenizer, "assistant\n")
    readers = ReasoningReaders(HarmonyParser, tokenizer).of(request, [seq])
    texts = (*HARMONY[:6], "<|start|>", "assistant", *CALL)
    starts = range(0, len(texts), size)
    outputs = [output(seq, *texts[at : at + size], is_last=at == starts[-1]) for at in starts]
    answer = ResponseEvents(body, "r", chat.answer_parser(HarmonyToolParser))
    for delta in RecordBuilder(tokenizer, "r").deltas(outputs, readers, includes_sources=False):
        answer.collect(delta)
    thought, said = answer.whole(Summary(1, len(texts), DraftCounts(), "r"))["output"]
    assert thought["content"][0]["text"] == "A b"
    if chat.may_call_tools:
        assert (said["name"], said["arguments"]) == ("f", '{"a":1}')
    else:
        assert said["content"][0]["text"] == '{"a":1}'


@pytest.mark.parametrize("is_special", [True, False])
def test_marks_that_are_special_tokens(tmp_path: Path, is_special: bool) -> None:
    """They stay in the text, where they can be read, unless the client wants them dropped."""
    source = bundled_model_path("hdserve-tiny")
    assert source is not None
    shutil.copytree(source, tmp_path / "m")
    with_think_marks(tmp_path / "m", is_special=is_special)
    readers = ReasoningReaders(ThinkParser, load_tokenizer(str(tmp_path / "m")))

    def sampling(**chosen: Any) -> dict[str, Any]:
        request = GenerationRequest("id", messages=CHAT.messages, sampling=chosen)
        return dict(readers.prepared(request, lambda _: "<think></think>").sampling)

    assert sampling() == ({"skip_special_tokens": False} if is_special else {})
    assert sampling(skip_special_tokens=True) == {"skip_special_tokens": True}
    assert sampling(grammar="g") == {"grammar": "g"}


ANSWER = grammar.json_object()
HELD = replace(CHAT, sampling={"grammar": ANSWER, "temperature": 0.5})


@pytest.mark.parametrize("end", ["", " ", "\n\n"])
@pytest.mark.parametrize(
    ("prompt", "has_room", "is_open"),
    [
        ("assistant\n<think>", True, True),
        ("assistant\n", True, False),
        ("assistant\n<think>\n\n</think>", False, False),
        ("<think>a</think>\nuser\n<think>\nassistant\n", True, False),
    ],
)
def test_a_grammar_leaves_room_for_reasoning(
    tokenizer: Tokenizer, prompt: str, has_room: bool, is_open: bool, end: str
) -> None:
    """Unless the prompt has closed it: what is told apart then is what the grammar does not
    hold."""
    readers = ReasoningReaders(ThinkParser, tokenizer)
    prepared = readers.prepared(HELD, lambda request: f"{prompt}{end}" * (request is HELD))
    assert prepared.reasons_first is has_room
    wanted = ThinkParser.grammar(ANSWER, is_open=is_open) if has_room else ANSWER
    assert prepared.sampling == {"grammar": wanted, "temperature": 0.5}
    seq = sequence(tokenizer, prompt + end)
    assert bool(readers.of(prepared, [seq])) is has_room
    for reader in readers.of(prepared, [seq]).values():
        begun = "Hm" if is_open else "<think>Hm"
        assert reader.read(output(seq, begun, "</think>", "{}", is_last=True)) == [("Hm", "{}")]


@pytest.mark.parametrize(("begun", "is_open"), [("<think>\nLet me", True), ("So", False)])
def test_a_held_message_may_go_on_in_thought(
    tokenizer: Tokenizer, begun: str, is_open: bool
) -> None:
    """One that says something already does not begin to think."""
    said = (*CHAT.messages, {"role": "assistant", "content": begun})
    goes_on = replace(HELD, messages=said, chat_end=ChatEnd.IN_LAST_MESSAGE)
    prepared = ReasoningReaders(ThinkParser, tokenizer).prepared(goes_on, lambda _: begun)
    assert prepared.reasons_first is is_open
    wanted = ThinkParser.grammar(ANSWER, is_open=True) if is_open else ANSWER
    assert prepared.sampling["grammar"] == wanted


def test_whose_grammar_holds_from_the_first_token_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """That of a model without a parser, of a plain completion, and of an answer whose marks are
    not in its text; none of them has its prompt made twice."""

    def prompt(_: GenerationRequest) -> str:
        raise AssertionError

    source = bundled_model_path("hdserve-tiny")
    assert source is not None
    shutil.copytree(source, tmp_path / "m")
    with_think_marks(tmp_path / "m", is_special=True)
    marked = ReasoningReaders(ThinkParser, load_tokenizer(str(tmp_path / "m")))
    without = replace(HELD, sampling={"grammar": ANSWER, "skip_special_tokens": True})
    plain = ReasoningReaders(ThinkParser, tokenizer)
    completion = GenerationRequest("id", prompts=("a",), sampling={"grammar": ANSWER})
    for readers, request in (
        (ReasoningReaders(None, tokenizer), HELD),
        (plain, completion),
        (marked, without),
    ):
        assert not readers.may_delay_grammar(request)
        assert readers.prepared(request, prompt) == request
    shown = plain.prepared(without, lambda _: "<think>")
    assert shown.reasons_first
    kept = marked.prepared(HELD, lambda _: "<think>")
    assert kept.reasons_first
    assert kept.sampling["skip_special_tokens"] is False

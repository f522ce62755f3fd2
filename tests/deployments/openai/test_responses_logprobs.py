"""Messages of responses have the log probabilities of their tokens, and of no others."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from deployments.events import Event
from deployments.generation import Alternative, Delta, TokenInfo
from deployments.http.json_answer import json_pieces, long_event
from deployments.openai.responses_events import ResponseEvents
from deployments.openai.responses_logprobs import TextTokens
from deployments.openai.responses_protocol import ResponsesBody
from deployments.parsers.harmony_parser import HarmonyParser
from deployments.parsers.reasoning_parser import ReasoningParser
from deployments.parsers.reasoning_parsers import ThinkParser
from deployments.parsers.tool_parser import ToolParser
from deployments.parsers.tool_parsers import (
    HarmonyToolParser,
    HermesToolParser,
    Llama3JsonToolParser,
)
from deployments.replica.reasoning_reader import ReasoningReader
from hdserve.core import FinishReason, SamplingParams, Sequence, StepOutput
from hdserve.errors import EngineStopped
from tests.deployments.answers import SUMMARY

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "Wait: Done."}}\n</tool_call>'
EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
SEQUENCE = Sequence("r", [1], SamplingParams())


def tokens_of(text: str, size: int) -> list[TokenInfo]:
    """Tokens of ``size`` bytes each, which need not be whole characters."""
    data = text.encode()
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    return [
        TokenInfo(piece, -float(index), (Alternative(b"\xc3", -1.0), Alternative(b"b", -2.0)))
        for index, piece in enumerate(pieces)
    ]


def answered(
    tokens: list[TokenInfo],
    num_each: int,
    parsers: tuple[type[ReasoningParser], type[ToolParser] | None] = (
        ThinkParser,
        HermesToolParser,
    ),
    **more: Any,
) -> list[Event]:
    """The events of an answer of ``num_each`` tokens in each step."""
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, **more}
    body = ResponsesBody.parse({"model": "m", "input": "hi", **asked})
    made = ResponseEvents(body, "r", parsers[1])
    found: list[Event] = []
    reader, texts = ReasoningReader(parsers[0](is_open=False)), iter(texts_of(tokens))
    for start in range(0, len(tokens), num_each):
        step = tuple(tokens[start : start + num_each])
        reason = FinishReason.STOP if start + num_each >= len(tokens) else None
        shown = tuple(islice(texts, len(step)))
        output = StepOutput(SEQUENCE, texts=shown, finish_reason=reason)
        for index, (reasoning, text) in enumerate(pieces := reader.read(output)):
            own = () if index else step
            end = reason if index == len(pieces) - 1 else None
            delta = Delta(0, 0, text, (1,), (0,), own, end, reasoning=reasoning or None)
            found += made.add(delta)
    return found + made.end(SUMMARY)


def texts_of(tokens: Iterable[TokenInfo]) -> Iterator[str]:
    """For each token what it makes visible."""
    decode = getincrementaldecoder("utf-8")().decode
    for token in tokens:
        yield "" if token.is_skipped else decode(token.data)


def written(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The events as a client reads them."""
    lines = [long_event(event).decode().split("\n") for event in events]
    assert all(len(each) == 4 for each in lines)
    return [json.loads(data.removeprefix("data: ")) for _, data, _, _ in lines]


def told(events: list[dict[str, Any]]) -> list[list[float]]:
    """The log probabilities of each message, which all events agree on."""
    found = []
    (*_, last) = events
    for index, item in enumerate(last["response"]["output"]):
        if item["type"] != "message":
            continue
        own = [event for event in events if event.get("output_index") == index]
        (part,) = item["content"]
        deltas = [event for event in own if event["type"] == "response.output_text.delta"]
        (done,) = [event for event in own if event["type"] == "response.output_text.done"]
        (part_done,) = [event for event in own if event["type"] == "response.content_part.done"]
        assert part_done["part"] == own[-1]["item"]["content"][0] == part
        assert done["logprobs"] == [entry for event in deltas for entry in event["logprobs"]]
        found.append([entry["logprob"] for entry in part["logprobs"]])
        assert [entry["logprob"] for entry in done["logprobs"]] == found[-1]
    return found


def joined(tokens: list[TokenInfo], logprobs: list[float]) -> str:
    """The text of the tokens that have these log probabilities."""
    return b"".join(tokens[-int(logprob)].data for logprob in logprobs).decode()


@pytest.mark.parametrize("num_each", [1, 3, 1000])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_said_has_its_tokens_and_no_others(size: int, num_each: int) -> None:
    """However they come, and whatever is thought and called between: that is the same text."""
    thought = "<think>Wait: Äh: Done.</think>\n\n"
    tokens = [TokenInfo(data, 0.0, ()) for data in (b"<s>",)]
    tokens[0] = tokens[0]._replace(is_skipped=True)
    for text in (thought, "Wait:", CALL, " Äh: Done."):
        tokens += tokens_of(text, size)
    tokens = [token._replace(logprob=-float(place)) for place, token in enumerate(tokens)]
    events = written(answered(tokens, num_each))
    for event in events:
        assert EVENTS.validate_python(event).type == event["type"]
    first, second = told(events)
    assert (joined(tokens, first), joined(tokens, second)) == ("Wait:", " Äh: Done.")
    assert min(second) == 1 - len(tokens)
    whole = Response.model_validate(events[-1]["response"])
    assert whole.output_text == "Wait: Äh: Done."


@pytest.mark.parametrize("num_each", [1, 3, 1000])
def test_text_behind_a_call_that_is_dropped_has_its_own_tokens(num_each: int) -> None:
    """Though the call, of which nothing is seen, begins with the same words."""
    arguments = json.dumps({"name": "f", "arguments": {"a": "Do it. Done. " * 20}})
    dropped = f"<tool_call>\n{arguments}\n</tool_call>"
    tokens = tokens_of(f"Wait: {CALL}{dropped}Do it. Done.", 2)
    tokens = [token._replace(logprob=-float(place)) for place, token in enumerate(tokens)]
    events = written(answered(tokens, num_each, parallel_tool_calls=False))
    first, second = told(events)
    assert (joined(tokens, first), joined(tokens, second)[-12:]) == ("Wait: ", "Do it. Done.")
    assert len(second) <= 7
    assert min(second) == 1 - len(tokens)


HARMONY: tuple[type[ReasoningParser], type[ToolParser]] = (HarmonyParser, HarmonyToolParser)
THINK = (ThinkParser, None)


@pytest.mark.parametrize("num_each", [1, 2, 1000])
@pytest.mark.parametrize(
    ("parsers", "words", "said"),
    [
        (THINK, ["<think>", "Well.", "</think>", "\n\n", "<", "answer", ">"], "<answer>"),
        (THINK, ["<think>", "\n\n", "</think>", "\n\n", "hi", " there"], "hi there"),
        ((HarmonyParser, None), ["<|channel|>", "final", "<|message|>", "a", " b"], "a b"),
    ],
    ids=["after reasoning", "after nothing", "of harmony"],
)
def test_a_mark_is_no_text(parsers: Any, words: list[str], said: str, num_each: int) -> None:
    """Though it begins like the text, or has it within."""
    tokens = [TokenInfo(word.encode(), -float(place), ()) for place, word in enumerate(words)]
    (found,) = told(written(answered(tokens, num_each, parsers)))
    assert joined(tokens, found) == said


NEXT = "<|end|><|start|>assistant<|channel|>"


def channels(text: str, size: int) -> list[TokenInfo]:
    """Tokens of what gpt-oss writes: each mark is one, what is between has tokens of its own."""
    parts = re.split(r"(<\|\w+\|>)", text)
    tokens = [
        token
        for part in filter(None, parts)
        for token in (infos(part) if part.startswith("<|") else tokens_of(part, size))
    ]
    return [token._replace(logprob=-float(place)) for place, token in enumerate(tokens)]


@pytest.mark.parametrize("num_each", [1, 3, 1000])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_in_channels_have_their_tokens_and_no_marks(size: int, num_each: int) -> None:
    """Neither where a message follows something else, nor where it follows a message, both of which
    are one item with a line break that no token has."""
    call = 'commentary to=functions.f <|constrain|>json<|message|>{"a": "Wait: Done."}<|call|>'
    tokens = channels(
        f"<|channel|>analysis<|message|>Hm: Wait.{NEXT}analysis<|message|>So?"
        f"{NEXT}commentary<|message|>Wait:\nÄh.{NEXT}final<|message|>Now.{NEXT}{call}"
        f"<|start|>assistant<|channel|>analysis<|message|>Well.{NEXT}final<|message|>Done.\n\nBye.",
        size,
    )
    events = written(answered(tokens, num_each, HARMONY))
    output = Response.model_validate(events[-1]["response"]).output
    texts = [item.content[0].text for item in output if item.type in ("reasoning", "message")]
    assert texts == ["Hm: Wait.\nSo?", "Wait:\nÄh.\nNow.", "Well.", "Done.\n\nBye."]
    first, second = told(events)
    assert joined(tokens, first) == "Wait:\nÄh.Now."
    assert joined(tokens, second) == "Done.\n\nBye."


@pytest.mark.parametrize("num_each", [1, 3, 1000])
@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (HermesToolParser, f"<tool_call>{'No call. ' * 60}"),
        (Llama3JsonToolParser, json.dumps({"answer": "Four. " * 60})),
    ],
)
def test_text_that_is_held_back_for_long_has_all_its_tokens(
    parser: type[ToolParser], text: str, num_each: int
) -> None:
    """Behind reasoning, as a parser that reads no call in it returns it at the end."""
    tokens = tokens_of("<think>Well.</think>", 4) + tokens_of(text, 2)
    tokens = [token._replace(logprob=-float(place)) for place, token in enumerate(tokens)]
    assert len(text) > 300
    (found,) = told(written(answered(tokens, num_each, (ThinkParser, parser))))
    assert joined(tokens, found) == text


@pytest.mark.parametrize("num_each", [1, 3, 1000])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_tokens_that_are_text_in_part_belong_to_it(size: int, num_each: int) -> None:
    """As a mark need not end where a token does; no token comes twice."""
    tokens = tokens_of(f"<think>no</think>Well{CALL}done", size)
    first, second = told(written(answered(tokens, num_each)))
    assert "Well" in joined(tokens, first)
    assert "done" in joined(tokens, second)
    assert len(joined(tokens, first)) < 4 + 2 * size
    assert len({*first, *second}) == len(first) + len(second)


def test_the_shapes_are_those_of_the_api() -> None:
    """A part has the bytes, too."""
    events = answered(tokens_of("Ä", 1), 2)
    (message,) = Response.model_validate(written(events[-1:])[0]["response"]).output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    entry, _ = part.logprobs or []
    shown = {"token": "\ufffd", "logprob": -1.0}
    other = {"token": "b", "logprob": -2.0}
    assert entry.to_dict() == {
        "token": "\ufffd",
        "logprob": 0.0,
        "bytes": [195],
        "top_logprobs": [{**shown, "bytes": [195]}, {**other, "bytes": [98]}],
    }
    (delta,) = [event for event in events if event["type"] == "response.output_text.delta"]
    first, _ = delta["logprobs"]
    assert first == {"token": "\ufffd", "logprob": 0.0, "top_logprobs": [shown, other]}


@pytest.mark.parametrize("num_tokens", [3, 1000])
def test_a_whole_response_is_the_one_a_stream_ends_with(num_tokens: int) -> None:
    """Also where there is so much of it that it is written piece by piece."""
    tokens = tokens_of("ab\u2028" * num_tokens, 5)
    events = answered(tokens, 7)
    (last,) = written(events[-1:])
    assert last["response"]["output"][0]["content"][0]["logprobs"] != []
    whole = json.loads(b"".join(json_pieces(events[-1]["response"])))
    assert whole == last["response"]
    assert max(map(len, json_pieces(events[-1]))) < 10_000 + 5 * num_tokens
    assert (whole["top_logprobs"], whole["max_tool_calls"]) == (2, None)


def test_a_response_that_failed_repeats_none() -> None:
    """It is written at once, however long it is."""
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = ResponsesBody.parse({"model": "m", "input": "hi", **asked})
    made = ResponseEvents(body, "r", HermesToolParser)
    step = tuple(tokens_of(f"Well.{CALL}", 3))
    made.add(Delta(0, 0, f"Well.{CALL}", (1,), (0,), step, None))
    (*_, failed) = made.fail(EngineStopped("the engine stopped"))
    (said, called) = failed["response"]["output"]
    assert (said["content"][0]["text"], said["content"][0]["logprobs"]) == ("Well.", [])
    assert called["type"] == "function_call"


def test_nothing_is_told_that_was_not_asked_for() -> None:
    body = ResponsesBody.parse({"model": "m", "input": "hi"})
    made = ResponseEvents(body, "r", None)
    events = [*made.add(Delta(0, 0, "Well.", (1,), (0,), None, "stop")), *made.end(SUMMARY)]
    assert told(written(events)) == [[]]
    assert made.size == 0


def test_how_much_there_is_to_write() -> None:
    """Tokens and alternatives; those of reasoning are read, too."""
    body = ResponsesBody.parse({"model": "m", "input": "hi", "top_logprobs": 2})
    made = ResponseEvents(body, "r", None)
    made.collect(Delta(0, 0, "Well.", (1,), (0,), tuple(tokens_of("Well.", 1)), "stop"))
    assert made.size == 5 * 3


def infos(*texts: str) -> list[TokenInfo]:
    return [TokenInfo(text.encode(), -1.0, ()) for text in texts]


def test_tokens_of_pieces() -> None:
    """The first piece that has a byte of a token has it."""
    tokens = TextTokens()
    hello, mark, rest = infos(" Hello", "<b", ">")
    tokens.add([hello, mark])
    assert tokens.take("Hel") == [hello]
    assert tokens.take("lo") == []
    tokens.add([rest])
    assert tokens.take("<b>") == [mark, rest]


def test_text_that_is_not_what_tokens_stand_for_has_all_that_are_left() -> None:
    """Bytes that make no character, for one."""
    tokens = TextTokens()
    half = TokenInfo(b"\xc3", -1.0, ())
    tokens.add([half, *infos("a")])
    assert tokens.take("\ufffda") == [half, *infos("a")]
    tokens.add(infos("b"))
    assert tokens.take("b") == infos("b")


def test_text_behind_long_reasoning_is_found() -> None:
    """What cannot be text any more is forgotten, and what a parser may have held back is not."""
    tokens = TextTokens()
    for index in range(1000):
        tokens.add(infos(f"{index}, "))
        tokens.pass_over(f"{index}, ")
    assert len(tokens._tokens) < 100
    tokens.add(infos("</think>", "4", ", <to"))
    assert tokens.take("4, ") == infos("4", ", <to")
    assert tokens.take("<to") == []


def test_calls_in_other_words_that_come_at_once_are_not_each_searched_for_in_all_tokens() -> None:
    """As where they were buffered to their end; text that came with that end is found behind."""
    tokens = TextTokens()
    for _ in range(10_000):
        tokens.add(infos("{ }, "))
    said = infos(*(f"{number}. " for number in range(100)))
    tokens.add([*infos("</tool_call>"), *said])
    tokens.add(())
    tokens.pass_over("{}")
    assert len(tokens._tokens) < 200
    assert len(tokens._data) == sum(len(token.data) for token in tokens._tokens)
    tokens.pass_over("{}")
    assert tokens.take("".join(token.data.decode() for token in said)) == said

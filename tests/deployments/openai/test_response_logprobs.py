"""Log probabilities of answers and of prompts in the OpenAI API's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from deployments.generation import Alternative, TokenInfo
from deployments.openai.chat_format import ChatFormat
from deployments.openai.completion_format import CompletionFormat
from deployments.openai.long_list import LongList
from tests.deployments.answers import SUMMARY, builder, collected, delta

HALVES = (
    TokenInfo(b"\xc3", -0.5, (Alternative(b"\xc3", -0.5), Alternative(b"\xe4", -1.0))),
    TokenInfo(b"\xa9", -0.25, ()),
    TokenInfo(b"z", -0.25, ()),
)
LOGPROBS = (
    TokenInfo("é".encode(), -0.5, (Alternative("é".encode(), -0.5), Alternative(b"b", -1.0))),
    TokenInfo(b"yz", -0.25, ()),
)


def test_chat_logprobs() -> None:
    """Tokens with their bytes, log probabilities and alternatives, over all deltas."""
    body = collected(
        ChatFormat(),
        delta("é", logprobs=LOGPROBS[:1]),
        delta("yz", logprobs=LOGPROBS[1:], finish_reason="stop"),
    )
    logprobs = ChatCompletion.model_validate(body).choices[0].logprobs
    assert logprobs is not None
    first, second = logprobs.content or []
    assert (first.token, first.logprob, first.bytes) == ("é", -0.5, [0xC3, 0xA9])
    assert [(item.token, item.logprob) for item in first.top_logprobs] == [("é", -0.5), ("b", -1)]
    assert second.top_logprobs == []


def test_completion_logprobs() -> None:
    """Parallel lists, with the offset of each token in the text, also across chunks."""
    parts = [
        delta("é", logprobs=LOGPROBS[:1]),
        delta("yz", logprobs=LOGPROBS[1:], finish_reason="stop"),
    ]
    logprobs = Completion.model_validate(collected(CompletionFormat(), *parts)).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["é", "yz"]
    assert logprobs.token_logprobs == [-0.5, -0.25]
    assert logprobs.top_logprobs == [{"é": -0.5, "b": -1.0}, {"yz": -0.25}]
    assert logprobs.text_offset == [0, 1]
    made = builder(CompletionFormat())
    chunks = [made.add(item)[0]["choices"][0]["logprobs"] for item in parts]
    assert [chunk["text_offset"] for chunk in chunks] == [[0], [1]]


def test_an_echo_has_logprobs() -> None:
    """The prompt's come first, with offsets from the start of its text, where the tokenizer put a
    token before it, too; those of the answer go on behind it, whole and streamed."""
    scored = (
        TokenInfo(b"<s>", None, ()),
        TokenInfo(b"\xc3", -1.5, (Alternative(b"a", -0.5),)),
        TokenInfo(b"\xa9", -0.25, ()),
        TokenInfo(b"on", -0.75, ()),
    )
    parts = [
        delta("yz", logprobs=LOGPROBS[1:], prompt_logprobs=scored),
        delta("é", logprobs=LOGPROBS[:1], finish_reason="stop"),
    ]
    for bos, offsets in (("", [0, 0, 0, 1, 3, 5]), ("<s>", [0, 3, 3, 4, 6, 8])):
        (body,) = collected(CompletionFormat((f"{bos}éon",)), *parts)["choices"]
        assert body["text"] == f"{bos}éonyzé"
        assert body["logprobs"] == {
            "tokens": ["<s>", "bytes:\\xc3", "bytes:\\xa9", "on", "yz", "é"],
            "token_logprobs": [None, -1.5, -0.25, -0.75, -0.25, -0.5],
            "top_logprobs": [
                None,
                {"a": -0.5, "bytes:\\xc3": -1.5},
                {"bytes:\\xa9": -0.25},
                {"on": -0.75},
                {"yz": -0.25},
                {"é": -0.5, "b": -1.0},
            ],
            "text_offset": offsets,
        }
        made = builder(CompletionFormat((f"{bos}éon",)))
        chunks = [made.add(part)[0]["choices"][0] for part in parts]
        assert [chunk["text"] for chunk in chunks] == [f"{bos}éonyz", "é"]
        for name, values in body["logprobs"].items():
            assert [chunk["logprobs"][name] for chunk in chunks] == [values[:5], values[5:]]


SCORED = (
    TokenInfo(b"<s>", None, (), 1),
    TokenInfo(b"a", -1.5, (Alternative(b"b", -0.5, 6), Alternative(b"a", -1.5, 5)), 5, 2),
    TokenInfo(b"\xc3", -3.0, (Alternative(b"b", -0.5, 6), Alternative(b"a", -1.5, 5)), 7, 42),
)
B = {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
A = {"logprob": -1.5, "rank": 2, "decoded_token": "a"}
HALF = {"logprob": -3.0, "rank": 42, "decoded_token": "\ufffd"}


@pytest.mark.parametrize(
    ("num_top", "shown"),
    [
        (0, [None, {"5": A}, {"7": HALF}]),
        (1, [None, {"5": A, "6": B}, {"7": HALF, "6": B}]),
        (2, [None, {"5": A, "6": B}, {"7": HALF, "6": B, "5": A}]),
    ],
)
def test_a_prompts_logprobs_by_token_id(num_top: int, shown: list[Any]) -> None:
    """The token that is there, whatever its rank, and the likeliest; of a completion in each
    choice, of a chat once, though they came with the second choice alone."""
    parts = [
        delta("x", choice, finish_reason="length", prompt_logprobs=SCORED if choice else ())
        for choice in (1, 0)
    ]
    form = CompletionFormat(num_prompt_logprobs=num_top)
    made = builder(form, 2)
    for part in parts:
        made.collect(part)
    completion = made.whole(SUMMARY)
    assert [choice["prompt_logprobs"] for choice in completion["choices"]] == [shown, shown]
    assert [choice["logprobs"] for choice in completion["choices"]] == [None, None]
    made = builder(ChatFormat(num_prompt_logprobs=num_top), 2)
    for part in parts:
        made.collect(part)
    chat = made.whole(SUMMARY)
    assert chat["prompt_logprobs"] == shown
    assert all("prompt_logprobs" not in choice for choice in chat["choices"])
    ChatCompletion.model_validate(chat)
    json.dumps([chat, completion], allow_nan=False)


def test_what_may_be_long_is_made_when_it_is_written() -> None:
    """And not kept as objects, among which the interpreter would look for garbage."""
    part = delta("\u00e9yz", logprobs=LOGPROBS, finish_reason="stop")
    for form, names in (
        (ChatFormat(), ("content",)),
        (CompletionFormat(num_logprobs=2), ("top_logprobs",)),
    ):
        made = builder(form)
        made.collect(part)
        assert made.size == 2 * (1 + len(LOGPROBS[-1].top))
        logprobs = made.whole(SUMMARY)["choices"][0]["logprobs"]
        (written,) = collected(form, part)["choices"]
        for name in names:
            assert isinstance(logprobs[name], LongList)
            assert logprobs[name][:] == [*logprobs[name]] == written["logprobs"][name]


def test_prompt_logprobs_are_no_echo() -> None:
    """Beside ``logprobs`` they are not among those of the answer; with an echo each has the number
    that was asked for."""
    part = delta("yz", logprobs=LOGPROBS[1:], finish_reason="stop", prompt_logprobs=SCORED)
    (choice,) = collected(CompletionFormat(num_logprobs=1, num_prompt_logprobs=2), part)["choices"]
    assert choice["logprobs"]["tokens"] == ["yz"]
    (choice,) = collected(CompletionFormat(num_logprobs=1), part)["choices"]
    assert "prompt_logprobs" not in choice
    form = CompletionFormat(("a\ufffd",), num_logprobs=1, num_prompt_logprobs=2)
    (choice,) = collected(form, part)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [
        None,
        {"b": -0.5, "a": -1.5},
        {"b": -0.5, "bytes:\\xc3": -3.0},
        {"yz": -0.25},
    ]
    assert choice["prompt_logprobs"][1] == {"5": A, "6": B}


def test_each_choice_has_the_echo_of_its_own_prompt() -> None:
    """Whose log probabilities came once, before the others' first deltas; whole and streamed."""
    parts = [
        delta("x", 1, 1, logprobs=LOGPROBS[1:], prompt_logprobs=SCORED[:2]),
        delta("x", 1, 0, logprobs=LOGPROBS[1:], prompt_logprobs=SCORED),
        *(delta("x", 0, prompt, logprobs=LOGPROBS[1:]) for prompt in (0, 1)),
        *(delta("y", choice, 1, logprobs=LOGPROBS[1:]) for choice in (0, 1)),
    ]
    form = CompletionFormat(("<s>a\ufffd", "<s>a"))
    echoes = [["<s>", "a", "bytes:\\xc3"]] * 2 + [["<s>", "a"]] * 2
    whole, streamed = builder(form, 2), builder(CompletionFormat(("<s>a\ufffd", "<s>a")), 2)
    for part in parts:
        whole.collect(part)
    choices = whole.whole(SUMMARY)["choices"]
    answers = [["yz"]] * 2 + [["yz", "yz"]] * 2
    found = [choice["logprobs"]["tokens"] for choice in choices]
    assert found == [[*echo, *answer] for echo, answer in zip(echoes, answers, strict=True)]
    chunks = [streamed.add(part)[0]["choices"][0] for part in parts]
    for index in range(4):
        tokens = [chunk["logprobs"]["tokens"] for chunk in chunks if chunk["index"] == index]
        assert tokens[0] == [*echoes[index], "yz"]
        assert tokens[1:] == [["yz"]] * (index // 2)


def test_an_echo_alone_has_no_logprobs() -> None:
    """Those that were computed for ``max_tokens: 0`` are not shown where nobody asked."""
    part = delta("", finish_reason="length", prompt_logprobs=(TokenInfo(b"a", None, ()),))
    (choice,) = collected(CompletionFormat(("a",)), part)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("a", None)


def test_of_two_tokens_with_one_text_the_likelier_is_shown() -> None:
    """So that the largest value stays that of the likeliest token."""
    twins = (Alternative(b"\n", -0.5), Alternative(b"\n", -3.0))
    tokens = (TokenInfo(b"x", -1.0, twins), TokenInfo(b"\n", -3.0, twins))
    (choice,) = collected(CompletionFormat(), delta("x\n", logprobs=tokens))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\n": -0.5, "x": -1.0}, {"\n": -0.5}]


@pytest.mark.parametrize("num", [0, 1])
def test_the_chosen_token_is_beside_the_likeliest(num: int) -> None:
    """As many as were asked for, and one more where it is none of them."""
    top = (Alternative(b"a", -0.5), Alternative(b"b", -1.0))[:num]
    tokens = (TokenInfo(b"c", -4.0, top), TokenInfo(b"a", -0.5, top))
    (choice,) = collected(CompletionFormat(num_logprobs=num), delta("ca", logprobs=tokens))[
        "choices"
    ]
    likeliest = {"a": -0.5} if num else {}
    assert choice["logprobs"]["top_logprobs"] == [{**likeliest, "c": -4.0}, {"a": -0.5}]


@pytest.mark.parametrize(("echo", "starts"), [("", [0, 0, 3, 3, 6]), ("ab", [2, 2, 5, 5, 8])])
def test_what_is_not_in_the_text_takes_no_place(echo: str, starts: list[int]) -> None:
    """Special tokens that are skipped, and a space that a decoder drops before the first token;
    whole and streamed."""
    end = TokenInfo(b"</s>", -1.0, (), is_skipped=True)
    tokens = (end, TokenInfo(b" one", -1.0, ()), end, TokenInfo(b" 22", -1.0, ()), end)
    parts = [delta("one", logprobs=tokens[:3]), delta(" 22", logprobs=tokens[3:])]
    echoes = (echo,) if echo else ()
    (choice,) = collected(CompletionFormat(echoes), *parts)["choices"]
    assert choice["logprobs"]["text_offset"] == starts
    assert choice["text"][starts[1] :].startswith("one 22")
    made = builder(CompletionFormat(echoes))
    chunks = [made.add(part)[0]["choices"][0]["logprobs"]["text_offset"] for part in parts]
    assert chunks == [starts[:3], starts[3:]]


@pytest.mark.parametrize(
    ("first", "text", "starts"),
    [
        ((b" ", b"\xe4\xbd", b"\xa0"), "你", [0, 0, 0]),
        ((b" ", b"x"), " x", [0, 1]),
        ((b" \xf0\x9f", b"\x98", b"\x80"), " 😀", [0, 1, 1]),
        ((b" o", b"ne"), "one", [0, 1]),
    ],
    ids=["dropped", "held back", "part of a character", "held back and dropped"],
)
def test_a_space_before_the_text_takes_as_much_place_streamed(
    first: tuple[bytes, ...], text: str, starts: list[int]
) -> None:
    """As in a whole answer, though its token comes before it is seen whether the text has it."""
    parts = [
        delta(text if token is first[-1] else "", logprobs=(TokenInfo(token, -1.0, ()),))
        for token in first
    ]
    (choice,) = collected(CompletionFormat(), *parts)["choices"]
    assert choice["logprobs"]["text_offset"] == starts
    made = builder(CompletionFormat())
    chunks = [made.add(part)[0]["choices"][0]["logprobs"]["text_offset"] for part in parts]
    assert chunks == [[start] for start in starts]


def test_spaces_before_the_text_are_counted_once_it_came() -> None:
    """Each is a token, and the first may have been dropped."""
    made = builder(CompletionFormat())
    texts = (("", b" "), ("", b" "), ("  x", b"x"), ("y", b"y"))
    parts = [delta(text, logprobs=(TokenInfo(token, -1.0, ()),)) for text, token in texts]
    chunks = [made.add(part)[0]["choices"][0]["logprobs"]["text_offset"] for part in parts]
    assert chunks == [[0], [0], [2], [3]]


def test_offsets_are_counted_per_choice() -> None:
    """The tokens of one choice do not move the offsets of another."""
    made = builder(CompletionFormat(), 2)
    for choice in (0, 1):
        chunk = made.add(delta("é", choice, logprobs=LOGPROBS))[0]
        assert chunk["choices"][0]["logprobs"]["text_offset"] == [0, 1]


def test_tokens_that_are_parts_of_characters() -> None:
    """Their bytes are the real ones, their names in completions distinct, and offsets count the
    characters they make together."""
    body = collected(ChatFormat(), delta("éz", logprobs=HALVES, finish_reason="stop"))
    tokens = ChatCompletion.model_validate(body).choices[0].logprobs
    assert tokens is not None
    assert tokens.content is not None
    assert b"".join(bytes(token.bytes or ()) for token in tokens.content).decode() == "éz"
    body = collected(CompletionFormat(), delta("éz", logprobs=HALVES, finish_reason="stop"))
    found = Completion.model_validate(body).choices[0].logprobs
    assert found is not None
    assert found.tokens == ["bytes:\\xc3", "bytes:\\xa9", "z"]
    assert found.top_logprobs is not None
    assert set(found.top_logprobs[0]) == {"bytes:\\xc3", "bytes:\\xe4"}
    assert found.text_offset == [0, 0, 1]


@pytest.mark.parametrize("first", [(b"<s>", b" ab"), (b" ab",), (b"ab",)])
def test_what_a_tokenizer_puts_before_a_prompt_takes_no_place(first: tuple[bytes, ...]) -> None:
    """A special token, and the space of SentencePiece's first token."""
    tokens = (*first, b" ab", b"c")
    prompt = tuple(TokenInfo(data, -1.0, ()) for data in tokens)
    body = collected(
        CompletionFormat(("ab abc",)),
        delta("d", logprobs=(TokenInfo(b"d", -1.0, ()),), finish_reason="stop")._replace(
            prompt_logprobs=prompt
        ),
    )
    found = Completion.model_validate(body).choices[0].logprobs
    assert found is not None
    assert found.text_offset == [*[0] * len(first), 2, 5, 6]

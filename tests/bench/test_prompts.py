"""Prompts that are too long lose their beginning."""

from __future__ import annotations

import pytest

from hdserve.bench.prompts import encode_prompt, encode_prompts, longest_prompt
from hdserve.engine.tokenization.tokenizer import load_tokenizer
from hdserve.errors import ConfigError, InvalidRequest
from hdserve.prompts import PromptRow

LONG = "Where is the museum, and when does it open? " * 20


def test_a_text_is_cut_at_its_front() -> None:
    tokenizer = load_tokenizer("hdserve-mini")
    row = PromptRow("a", "all", LONG + "Thank you.")
    whole = encode_prompt(row, tokenizer, 4096)
    assert not whole.is_cut
    size = len(whole.token_ids)
    assert encode_prompt(row, tokenizer, size) == whole
    assert len(encode_prompt(row, tokenizer, size - 1).token_ids) < size
    cut = encode_prompt(row, tokenizer, 64)
    assert cut.is_cut
    assert len(cut.token_ids) <= 64
    assert "it open? Thank you." in tokenizer.decode(list(cut.token_ids))


@pytest.mark.parametrize("text", ["你好世界。", "😀🎉", "é ü ñ "])
def test_a_text_is_cut_between_its_characters(text: str) -> None:
    """Also where each of them is several tokens."""
    tokenizer = load_tokenizer("hdserve-mini")
    row = PromptRow("a", "all", text * 20)
    for longest in range(40, 52):
        cut = encode_prompt(row, tokenizer, longest)
        assert cut.is_cut
        assert longest - 12 < len(cut.token_ids) <= longest
        prompt = tokenizer.decode(cut.token_ids)
        assert "\N{REPLACEMENT CHARACTER}" not in prompt
        assert text.strip() in prompt


def test_an_answer_as_long_as_the_context_leaves_no_prompt() -> None:
    assert longest_prompt(2048, 2047) == 1
    for max_tokens in (2048, 100_000):
        with pytest.raises(ConfigError, match=f"--max-tokens {max_tokens} .* 2048 tokens"):
            longest_prompt(2048, max_tokens)


def test_a_conversation_loses_its_oldest_text_first() -> None:
    """Its messages stay, so that their order is still that of a conversation."""
    tokenizer = load_tokenizer("hdserve-mini")
    last = {"role": "user", "content": "And on Monday?"}
    old = [{"role": "user", "content": LONG}, {"role": "assistant", "content": LONG}]
    row = PromptRow("a", "all", "", [*old, last])
    emptied = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, last]
    least = len(tokenizer.encode_chat(emptied, {}))
    cut = encode_prompt(row, tokenizer, least)
    assert cut.is_cut
    assert cut.token_ids == tuple(tokenizer.encode_chat(emptied, {}))
    assert row.messages == [*old, last]
    half = encode_prompt(row, tokenizer, least + 40)
    assert half.token_ids[-8:] == cut.token_ids[-8:]
    assert least < len(half.token_ids) <= least + 40
    with pytest.raises(ConfigError, match="template alone has more than 2 tokens; a smaller --max"):
        encode_prompt(row, tokenizer, 2)


def test_a_conversation_of_parts_is_cut_as_one_of_texts() -> None:
    tokenizer = load_tokenizer("hdserve-mini")
    plain = PromptRow("a", "all", "", [{"role": "user", "content": LONG}])
    parts = [{"type": "text", "text": LONG}]
    row = PromptRow("a", "all", "", [{"role": "user", "content": parts}])
    found = encode_prompt(row, tokenizer, 64)
    assert found.is_cut
    assert found.token_ids == encode_prompt(plain, tokenizer, 64).token_ids


def test_a_row_that_cannot_be_asked_is_named() -> None:
    """From 1 on, as by all commands that take a file."""
    image = [{"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}]
    tokenizer = load_tokenizer("hdserve-mini")
    for wrong, reason in (
        ({"role": "user", "content": image}, "content parts of type 'image_url'"),
        ({"content": "a"}, "a message needs a role"),
    ):
        rows = [PromptRow("81", "all", "a"), PromptRow("82", "all", "", [wrong])]
        with pytest.raises(InvalidRequest, match=f"^row 2: {reason}"):
            list(encode_prompts(rows, tokenizer, 64))

"""No more of a text is made tokens of than it takes to see that it is far too long."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from hdserve.engine.tokenization.text_beginning import encode_beginning
from hdserve.engine.tokenization.tokenizer import Tokenizer, load_tokenizer


def without_words() -> Tokenizer:
    """One of pieces, as SentencePiece makes them, with bytes for what it does not know."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    pieces += ["ab", "▁ab", "▁▁", "▁▁▁▁"]
    merges = [("a", "b"), ("▁", "ab"), ("▁", "▁"), ("▁▁", "▁▁")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def of_whole_words() -> Tokenizer:
    """Words, however long, are one token where they are unknown."""
    backend = tokenizers.Tokenizer(WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def with_a_greedy_token() -> Tokenizer:
    """It takes in the white space around it, all there is."""
    tokenizer = load_tokenizer("hdserve-tiny")
    token = tokenizers.AddedToken("<mask>", lstrip=True, rstrip=True, special=True)
    tokenizer.backend.add_special_tokens([token])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend))


TOKENIZERS = {
    "byte level": load_tokenizer("hdserve-tiny"),
    "pieces": without_words(),
    "words": of_whole_words(),
    "greedy token": with_a_greedy_token(),
}
DRAWN = random.Random(1)
TEXTS = {
    "words": "I want to book a table for two in San Jose. " * 200,
    "spaces": " " * 9000,
    "spaces before text": " " * 9000 + "ab",
    "lines before a token": "\n\t" * 4000 + "<mask>",
    "spaces between": (" " * 1500 + "ab") * 6,
    "lines": "\n\t" * 4000,
    "one word": "ab" * 4000,
    "emoji": "👩\u200d👩\u200d👧\u200d👦" * 800,
    "CJK": "漢字かな交じり文、" * 500,
    "combined": "e\u0301" * 3000,
    "special tokens": "<|im_start|><mask>" * 400,
    "anything": "".join(chr(DRAWN.choice([32, 97, DRAWN.randrange(0xD800)])) for _ in range(5000)),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_is_cut_has_far_more_tokens(name: str, text: str) -> None:
    """And begins with those that are given; all else is whole."""
    tokenizer = TOKENIZERS[name]
    whole = tokenizer.encode(text)
    for num_tokens in (1, 8, 100, 500, 1200):
        found = encode_beginning(tokenizer, text, num_tokens)
        if found.is_whole:
            assert found.token_ids == whole
        else:
            assert num_tokens * 1.25 < len(found.token_ids) < len(whole)
            assert found.token_ids == whole[: len(found.token_ids)]


@pytest.mark.parametrize("name", ["byte level", "pieces", "greedy token"])
@pytest.mark.parametrize("text", ["a b " * 4000, " " * 99_000, " " * 2000 + "a b " * 9000])
def test_far_too_long_texts_are_cut(name: str, text: str) -> None:
    """Also behind white space, of which one token can be much."""
    found = encode_beginning(TOKENIZERS[name], text, 100)
    assert not found.is_whole
    assert len(found.token_ids) < len(TOKENIZERS[name].encode(text)) / 2


@pytest.mark.parametrize("name", ["byte level", "pieces"])
@pytest.mark.parametrize("space", [" ", "\n", "\n\t", " \n\t"])
def test_white_space_is_cut_where_no_token_takes_it_in(name: str, space: str) -> None:
    """However little follows it."""
    tokenizer = TOKENIZERS[name]
    text = space * (200_000 // len(space)) + "ab"
    found = encode_beginning(tokenizer, text, 100)
    whole = tokenizer.encode(text)
    assert not found.is_whole
    assert len(found.token_ids) < len(whole) / 2
    assert found.token_ids == whole[: len(found.token_ids)]


def test_special_tokens_are_added_as_they_are_to_a_whole_text() -> None:
    """Or are not."""
    tokenizer = load_tokenizer("hdserve-tiny")
    backend = tokenizer.backend
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    for text in ("a b", "a b " * 1000):
        for adds in (True, False):
            found = encode_beginning(tokenizer, text, 10, adds_special_tokens=adds)
            assert found.is_whole is (len(text) < 10)
            assert (found.token_ids[0] == 1) is adds

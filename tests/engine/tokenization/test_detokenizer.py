"""Text grows token by token: no half characters, no part of a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hdserve.core import SamplingParams
from hdserve.engine.tokenization.detokenizer import Detokenizer
from hdserve.engine.tokenization.tokenizer import load_tokenizer

BUNDLED = load_tokenizer("hdserve-tiny")
VOCAB_SIZE = BUNDLED.backend.get_vocab_size()
BYTE_TOKENS = [token for token in range(VOCAB_SIZE) if "\ufffd" in BUNDLED.decode([token])]

TOKEN_IDS = st.lists(
    st.one_of(
        st.integers(0, VOCAB_SIZE - 1),
        st.sampled_from(BYTE_TOKENS),
        st.sampled_from([0, 1, 2]),
        st.just(VOCAB_SIZE + 5),
    ),
    max_size=20,
)
TEXTS = st.text(max_size=30) | st.text(alphabet="ab é中🙂\n", max_size=40)


def push_all(
    detokenizer: Detokenizer, token_ids: list[int], *, num_deaf: int = 0
) -> tuple[list[str], str]:
    """The pieces token by token, up to a stop string, and the rest."""
    pieces = []
    for index, token_id in enumerate(token_ids):
        pieces.append(detokenizer.push(token_id, may_stop=index >= num_deaf))
        if detokenizer.is_stopped:
            break
    return pieces, detokenizer.finish()


@settings(max_examples=120)
@given(token_ids=TOKEN_IDS, skips=st.booleans())
def test_pieces_are_the_whole(token_ids: list[int], skips: bool) -> None:
    """The pieces together are what decoding everything at once gives, for any token ids: bytes
    that are no characters, special tokens, ids the tokenizer does not know."""
    detokenizer = Detokenizer(BUNDLED.backend, SamplingParams(skip_special_tokens=skips))
    pieces, rest = push_all(detokenizer, token_ids)
    assert "".join(pieces) + rest == BUNDLED.decode(token_ids, skips_special_tokens=skips)


@settings(max_examples=120)
@given(
    token_ids=st.lists(st.sampled_from(BYTE_TOKENS), min_size=20, max_size=120),
    text=TEXTS,
    skips=st.booleans(),
)
def test_bytes_that_are_no_characters_do_not_gather(
    token_ids: list[int], text: str, skips: bool
) -> None:
    """They are shown at latest when some more have come; what is text behind them stays text."""
    token_ids = [*token_ids, *BUNDLED.encode(text)]
    detokenizer = Detokenizer(BUNDLED.backend, SamplingParams(skip_special_tokens=skips))
    pieces, rest = push_all(detokenizer, token_ids)
    assert "".join(pieces) + rest == BUNDLED.decode(token_ids, skips_special_tokens=skips)
    for end in range(20, len(pieces)):
        assert any(pieces[end - 20 : end])


@settings(max_examples=120)
@given(text=TEXTS)
def test_no_half_characters(text: str) -> None:
    """Of real text no piece has a replacement character, and nothing is left at the end."""
    token_ids = BUNDLED.encode(text)
    assume(BUNDLED.decode(token_ids) == text)
    pieces, rest = push_all(Detokenizer(BUNDLED.backend, SamplingParams()), token_ids)
    for piece in pieces:
        assert piece.count("\ufffd") <= text.count("\ufffd")
    assert "".join(pieces) + rest == text
    assert rest == "" or text.endswith("\ufffd")


def test_a_split_character_waits() -> None:
    """A character of several tokens comes with its last one; cut off, it shows at the end."""
    token_ids = BUNDLED.encode("a🙂")
    assert len(token_ids) > 2
    pieces, rest = push_all(Detokenizer(BUNDLED.backend, SamplingParams()), token_ids)
    assert pieces[-1].endswith("🙂")
    assert "".join(pieces[:-1]) == "a"
    assert rest == ""
    pieces, rest = push_all(Detokenizer(BUNDLED.backend, SamplingParams()), token_ids[:-1])
    assert "".join(pieces) == "a"
    assert set(rest) == {"\ufffd"}


def complete_text(token_ids: list[int]) -> str:
    """What may be known of the text: an unfinished character is not."""
    for end in range(len(token_ids), 0, -1):
        text = BUNDLED.decode(token_ids[:end])
        if not text.endswith("\ufffd"):
            return text
    return ""


def cut_by_definition(
    token_ids: list[int], stop: tuple[str, ...], *, includes: bool
) -> tuple[str, bool]:
    """The text up to the first stop string of the first token that completes one."""
    for end in range(1, len(token_ids) + 1):
        text = complete_text(token_ids[:end])
        found = [(text.find(item), item) for item in stop if item in text]
        if found:
            at, item = min(found)
            return text[: at + len(item)] if includes else text[:at], True
    return BUNDLED.decode(token_ids), False


STOPPING_TEXTS = st.text(alphabet="ab c.é🙂", min_size=1, max_size=30)


@settings(max_examples=150)
@given(text=STOPPING_TEXTS, data=st.data(), includes=st.booleans())
def test_stop_strings_never_leak(text: str, data: st.DataObject, includes: bool) -> None:
    """The output ends where the first stop string begins (or ends, if it is included), and at no
    time is anything shown that is not part of that output."""
    stop = data.draw(
        st.lists(st.text(alphabet="ab c.é🙂", min_size=1, max_size=4), min_size=1, max_size=3).map(
            tuple
        )
    )
    token_ids = BUNDLED.encode(text)
    if data.draw(st.booleans()):
        token_ids = [token for letter in text for token in BUNDLED.encode(letter)]
    params = SamplingParams(stop=stop, include_stop_str_in_output=includes)
    wanted, is_stopped = cut_by_definition(token_ids, stop, includes=includes)
    detokenizer = Detokenizer(BUNDLED.backend, params)
    shown = ""
    for token_id in token_ids:
        shown += detokenizer.push(token_id)
        assert wanted.startswith(shown)
        if detokenizer.is_stopped:
            break
    assert detokenizer.is_stopped == is_stopped
    assert shown + detokenizer.finish() == wanted
    if not includes:
        assert not any(item in wanted for item in stop)


@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        (["a", "b", "c"], ("bc",), ["a", "", ""]),
        (["a", "b", "d"], ("bc",), ["a", "", "bd"]),
        (["a", "a", "a", "b"], ("aab",), ["", "", "a", ""]),
        (["a", "b", "a", "b", "c"], ("ababd", "bc"), ["", "", "", "", "aba"]),
        (["x", "b"], ("b", "xb"), ["", ""]),
    ],
)
def test_what_may_become_a_stop_string_is_held(
    pieces: list[str], stop: tuple[str, ...], shown: list[str]
) -> None:
    """The longest end that may begin any stop string waits; what cannot become one goes on."""
    detokenizer = Detokenizer(BUNDLED.backend, SamplingParams(stop=stop))
    token_ids = [BUNDLED.backend.token_to_id(piece) for piece in pieces]
    assert [detokenizer.push(token_id) for token_id in token_ids] == shown


def test_what_is_held_shows_at_the_end() -> None:
    """The beginning of a stop string that never came belongs to the output."""
    detokenizer = Detokenizer(BUNDLED.backend, SamplingParams(stop=("bcd",)))
    token_ids = BUNDLED.encode("abc")
    shown = "".join(detokenizer.push(token_id) for token_id in token_ids)
    assert "b" not in shown
    assert shown + detokenizer.finish() == "abc"


HALF = "Ġâ"
"""A space and the first byte of a character of three."""


def test_a_stop_string_ends_before_a_character_that_is_cut_off() -> None:
    """Its token holds the last of the stop string, and nothing follows that would complete it."""
    backend = byte_level_backend_with(HALF)
    token_ids = [backend.token_to_id(piece) for piece in ("a", ":", HALF)]
    detokenizer = Detokenizer(backend, SamplingParams(stop=(": ",)))
    shown = "".join(map(detokenizer.push, token_ids))
    assert not detokenizer.is_stopped
    assert shown + detokenizer.finish() == "a"
    assert detokenizer.is_stopped
    deaf = Detokenizer(backend, SamplingParams(stop=(": ",)))
    shown = "".join(deaf.push(token_id, may_stop=False) for token_id in token_ids)
    assert shown + deaf.finish(may_stop=False) == "a: \N{REPLACEMENT CHARACTER}"
    assert not deaf.is_stopped


def byte_level_backend_with(piece: str) -> Backend:
    """A byte-level vocabulary with one token more."""
    characters = sorted(bytes_to_unicode().values())
    backend = Backend(models.BPE({char: n for n, char in enumerate([*characters, piece])}, []))
    backend.decoder = decoders.ByteLevel()
    return backend


def cut_after_deaf(
    token_ids: list[int], stop: tuple[str, ...], num_deaf: int, *, includes: bool
) -> tuple[str, bool]:
    """The text up to the first stop string of the first token after ``num_deaf`` with which one
    ends."""
    for end in range(num_deaf + 1, len(token_ids) + 1):
        text, before = complete_text(token_ids[:end]), complete_text(token_ids[: end - 1])
        found = [
            (at, item)
            for item in stop
            for at in range(len(text))
            if text.startswith(item, at) and at + len(item) > len(before)
        ]
        if found:
            at, item = min(found)
            return text[: at + len(item)] if includes else text[:at], True
    return BUNDLED.decode(token_ids), False


@settings(max_examples=150)
@given(
    text=STOPPING_TEXTS,
    stop=st.lists(st.text(alphabet="ab c.", min_size=1, max_size=4), min_size=1, max_size=3),
    num_deaf=st.integers(0, 12),
    includes=st.booleans(),
)
def test_a_stop_string_counts_by_where_it_ends(
    text: str, stop: list[str], num_deaf: int, includes: bool
) -> None:
    """As long as the sequence may not stop, a stop string that ends is text like any other; one
    that ends later stops, wherever it begins, and nothing of it was shown."""
    token_ids = [token for letter in text for token in BUNDLED.encode(letter)]
    params = SamplingParams(stop=tuple(stop), include_stop_str_in_output=includes)
    wanted, is_stopped = cut_after_deaf(token_ids, params.stop, num_deaf, includes=includes)
    detokenizer = Detokenizer(BUNDLED.backend, params)
    pieces, rest = push_all(detokenizer, token_ids, num_deaf=num_deaf)
    assert ("".join(pieces) + rest, detokenizer.is_stopped) == (wanted, is_stopped)


@pytest.mark.parametrize(
    ("text", "stop", "num_deaf", "pieces"),
    [
        ("abcd", ("bcd",), 1, ["a", "", "", ""]),
        ("abcd", ("bcd",), 3, ["a", "", "", ""]),
        ("abcd", ("bcd",), 4, ["a", "", "", "bcd"]),
        ("abd", ("b", "abc"), 2, ["", "", "abd"]),
        ("abbd", ("b", "abc"), 2, ["", "", "ab"]),
        ("bcab", ("b", "ab"), 2, ["b", "c", "", ""]),
    ],
)
def test_a_stop_string_of_several_tokens_at_the_minimum(
    text: str, stop: tuple[str, ...], num_deaf: int, pieces: list[str]
) -> None:
    detokenizer = Detokenizer(BUNDLED.backend, SamplingParams(stop=stop))
    token_ids = [token for letter in text for token in BUNDLED.encode(letter)]
    assert push_all(detokenizer, token_ids, num_deaf=num_deaf)[0] == pieces


def test_special_tokens() -> None:
    """Special tokens show only where they are asked for."""
    token_ids = [*BUNDLED.encode("a"), 2, *BUNDLED.encode("b"), 2]
    for skips, wanted in ((True, "ab"), (False, "a<|im_end|>b<|im_end|>")):
        detokenizer = Detokenizer(BUNDLED.backend, SamplingParams(skip_special_tokens=skips))
        pieces, rest = push_all(detokenizer, token_ids)
        assert "".join(pieces) + rest == wanted


def test_nothing_comes_after_the_stop() -> None:
    """A stopped text is complete."""
    detokenizer = Detokenizer(BUNDLED.backend, SamplingParams(stop=("a",)))
    (token_id,) = BUNDLED.encode("a")
    assert detokenizer.push(token_id) == ""
    assert detokenizer.finish() == ""
    with pytest.raises(AssertionError):
        detokenizer.push(token_id)


def byte_fallback_backend() -> Any:
    """A tokenizer in the manner of SentencePiece: a token per byte, and a few words."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "é"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


FALLBACK = byte_fallback_backend()


@settings(max_examples=120)
@given(token_ids=st.lists(st.integers(0, 262) | st.sampled_from([3 + 0xC3, 3 + 0xA9]), max_size=12))
def test_bytes_that_are_no_text(token_ids: list[int]) -> None:
    """Decoders with byte fallback take characters back when more bytes follow; the text goes on
    all the same, and equals the whole wherever the bytes are UTF-8."""
    detokenizer = Detokenizer(FALLBACK, SamplingParams())
    pieces, rest = push_all(detokenizer, token_ids)
    text = "".join(pieces) + rest
    whole = FALLBACK.decode(token_ids)
    if "\ufffd" not in whole:
        assert text == whole
    num_words = token_ids.count(FALLBACK.token_to_id("▁a"))
    assert text.count("a") >= num_words


def test_text_goes_on_after_bytes_that_are_no_text() -> None:
    """After a stray byte the words that follow are there, with the spaces between them."""
    ids = [FALLBACK.token_to_id(word) for word in ("<0xC3>", "<0xA9>", "<0x80>", "▁a", "▁a", "b")]
    pieces, rest = push_all(Detokenizer(FALLBACK, SamplingParams()), ids)
    assert pieces[:2] == ["", "é"]
    assert ("".join(pieces) + rest).endswith(" a ab")


@pytest.mark.parametrize("num_special", [1, 16, 17, 40, 400])
@pytest.mark.parametrize("before", [[], ["▁a"], ["b", "</s>"]])
@pytest.mark.parametrize("prompt", [[], ["▁a"]])
def test_text_goes_on_after_special_tokens(
    prompt: list[str], before: list[str], num_special: int
) -> None:
    """With the space between words, however many tokens show nothing in between."""
    words = [*before, *["<s>"] * num_special, "▁a", "b", "▁a"]
    prompt_ids, token_ids = ([*map(FALLBACK.token_to_id, each)] for each in (prompt, words))
    detokenizer = Detokenizer(FALLBACK, SamplingParams(), prompt_ids)
    pieces, rest = push_all(detokenizer, token_ids)
    whole = FALLBACK.decode([*prompt_ids, *token_ids])
    assert "".join(pieces) + rest == whole.removeprefix(FALLBACK.decode(prompt_ids))


def test_a_prompt_that_is_a_space_alone() -> None:
    """What follows it does not begin a text."""
    words = ["▁", "▁a", "a"]
    backend = Backend(models.WordLevel({word: n for n, word in enumerate(words)}, "a"))
    backend.decoder = decoders.Metaspace()
    assert backend.decode([0]) == ""
    detokenizer = Detokenizer(backend, SamplingParams(), [0])
    pieces, rest = push_all(detokenizer, [1, 2])
    assert "".join(pieces) + rest == backend.decode([0, 1, 2]) == " aa"


WORDS = st.lists(st.sampled_from(["▁a", "b", "é", "<s>", "</s>"]), max_size=8)


@given(prompt=WORDS, words=WORDS.filter(bool), skips=st.booleans())
def test_the_text_goes_on_after_the_prompt(
    prompt: list[str], words: list[str], skips: bool
) -> None:
    """Decoders drop the space before the first word of a text; before the first word of an output
    it stays, so that prompt and output together are what decoding both at once gives."""
    before, token_ids = ([FALLBACK.token_to_id(word) for word in each] for each in (prompt, words))
    params = SamplingParams(skip_special_tokens=skips)
    pieces, rest = push_all(Detokenizer(FALLBACK, params, before), token_ids)
    begun = FALLBACK.decode(before, skip_special_tokens=skips)
    whole = FALLBACK.decode([*before, *token_ids], skip_special_tokens=skips)
    assert begun + "".join(pieces) + rest == whole


@pytest.mark.parametrize("prompt", [["b", "<0xC3>"], ["<0xC3>"], ["<s>"], ["▁a"], []])
def test_what_a_prompt_leaves_unfinished_is_not_of_the_output(prompt: list[str]) -> None:
    """Nothing of the prompt shows, whatever it ends with."""
    before = [FALLBACK.token_to_id(word) for word in prompt]
    token_ids = [FALLBACK.token_to_id(word) for word in ("b", "▁a", "b")]
    pieces, rest = push_all(Detokenizer(FALLBACK, SamplingParams(), before), token_ids)
    assert ("".join(pieces) + rest).removeprefix("\ufffd") == "b ab"


@pytest.mark.parametrize("num_skipped", [1, 16, 17, 40])
def test_special_tokens_that_are_skipped_begin_no_text_anew(num_skipped: int) -> None:
    """Whose first space a decoder would drop."""
    backend = Backend(models.WordLevel({"a": 0, "\u2581b": 1, "?": 2}, unk_token="?"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    detokenizer = Detokenizer(backend, SamplingParams(), [0])
    pieces, rest = push_all(detokenizer, [backend.token_to_id("</s>")] * num_skipped + [1, 1])
    assert "".join(pieces) + rest == " b b"

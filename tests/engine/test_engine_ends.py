"""Where a sequence ends, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hdserve.core import FinishReason, Source
from hdserve.engine.tokenization.tokenizer import Tokenizer
from tests.drafters import JunkDrafter, OracleDrafter
from tests.engine.helpers import GREEDY, TOKENIZER, plain
from tests.engines import make_engine, make_prompt, make_sequence, run
from tests.models import MAX_POSITIONS, VOCAB_SIZE, make_model


def model_with_eos(*token_ids: int) -> torch.nn.Module:
    model = make_model()
    model.generation_config.eos_token_id = list(token_ids)
    return model


def test_max_tokens_is_exact_with_drafts() -> None:
    """A sequence ends at its limit even where more drafts were right, and says ``length``."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY, max_tokens=30).token_ids
    for max_tokens in (1, 2, 5, 6, 7):
        seq = make_sequence("a", prompt, **GREEDY, max_tokens=max_tokens)
        run(make_engine([OracleDrafter({"a": future})]), [seq])
        assert seq.token_ids == future[: len(prompt) + max_tokens]
        assert seq.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("has_drafts", [False, True])
def test_the_context_ends(has_drafts: bool) -> None:
    """Without ``max_tokens``, or with too many, the answer ends with the model's context."""
    prompt = make_prompt(20)
    future = plain(prompt, **GREEDY, max_tokens=40).token_ids
    for max_tokens in (None, 1000):
        seq = make_sequence("a", prompt, **GREEDY, max_tokens=max_tokens)
        drafters = [OracleDrafter({"a": future})] if has_drafts else []
        run(make_engine(drafters, max_model_len=32), [seq])
        assert seq.token_ids == future[:32]
        assert seq.finish_reason is FinishReason.LENGTH


def test_the_whole_context_of_the_model_can_be_used() -> None:
    """The last position of the model is decoded at, with a tree that would reach beyond it."""
    seq = make_sequence("a", make_prompt(MAX_POSITIONS - 5), **GREEDY, max_tokens=None)
    run(make_engine([JunkDrafter(VOCAB_SIZE)]), [seq])
    assert len(seq.token_ids) == MAX_POSITIONS
    seq = make_sequence("a", make_prompt(MAX_POSITIONS - 1), **GREEDY)
    run(make_engine([JunkDrafter(VOCAB_SIZE)]), [seq])
    assert seq.num_output_tokens == 1


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("kind", ["eos", "second eos", "stop_token_ids"])
def test_ending_tokens(kind: str, has_drafts: bool) -> None:
    """Each end-of-sequence id of the model and each stop token ends the sequence; it is the last
    token, though not part of the text, and accepted drafts behind it are dropped, as are their
    sources.  A stop token alone is told as what ended it."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY, max_tokens=30).token_ids
    at = next(n for n in range(len(prompt) + 3, 39) if future[n] not in future[len(prompt) : n])
    ending = future[at]
    options: dict[str, Any] = {"model": model_with_eos(0, ending), "tokenizer": TOKENIZER}
    params: dict[str, Any] = {}
    if kind == "eos":
        options["model"] = model_with_eos(ending)
    elif kind == "stop_token_ids":
        options["model"], params = make_model(), {"stop_token_ids": (ending,)}
    drafters = [OracleDrafter({"a": future}, length=11)] if has_drafts else []
    seq = make_sequence("a", prompt, **GREEDY, **params, max_tokens=30)
    outputs = run(make_engine(drafters, **options), [seq])
    assert seq.token_ids == future[: at + 1]
    assert seq.finish_reason is FinishReason.STOP
    stop_reasons = [output.stop_reason for output in outputs]
    wanted_reason = ending if kind == "stop_token_ids" else None
    assert stop_reasons == [None] * (len(outputs) - 1) + [wanted_reason]
    text = "".join(output.text for output in outputs)
    assert text == TOKENIZER.decode(future[len(prompt) : at], skips_special_tokens=True)
    sources = [source for output in outputs for source in output.sources]
    wanted = Source.OTHER if has_drafts else Source.PLAIN
    assert sources == [wanted] * seq.num_output_tokens


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor], ids=["int", "numpy", "torch"])
def test_stop_tokens_may_be_integers_of_any_type(kind: Callable[[int], Any]) -> None:
    """Those of PyTorch are equal to integers, but not found among them."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY, max_tokens=30).token_ids
    at = next(n for n in range(len(prompt) + 3, 39) if future[n] not in future[len(prompt) : n])
    seq = make_sequence("a", prompt, **GREEDY, stop_token_ids=(kind(future[at]),), max_tokens=30)
    *_, last = run(make_engine(), [seq])
    assert seq.token_ids == future[: at + 1]
    assert (seq.finish_reason, last.stop_reason) == (FinishReason.STOP, future[at])


def test_ignore_eos() -> None:
    """With ``ignore_eos`` an end-of-sequence token is one like any other; a stop token still
    stops, also if it is the end-of-sequence token, and is told."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY, max_tokens=30).token_ids
    eos, stop = future[len(prompt) + 2], future[len(prompt) + 12]
    engine = make_engine(model=model_with_eos(eos))
    seq = make_sequence("a", prompt, **GREEDY, ignore_eos=True, max_tokens=30)
    run(engine, [seq])
    assert seq.token_ids == future
    assert seq.finish_reason is FinishReason.LENGTH
    for token_id in (stop, eos):
        seq = make_sequence("b", prompt, **GREEDY, ignore_eos=True, stop_token_ids=(token_id,))
        *_, last = run(engine, [seq])
        assert seq.token_ids[-1] == token_id
        assert seq.finish_reason is FinishReason.STOP
        assert last.stop_reason == token_id
    seq = make_sequence("c", prompt, **GREEDY, stop_token_ids=(eos,))
    *_, last = run(engine, [seq])
    assert (seq.token_ids[-1], last.stop_reason) == (eos, None)


def test_min_tokens_delays_every_end() -> None:
    """Before ``min_tokens`` neither an end-of-sequence token is chosen nor a stop string heeded."""
    prompt = make_prompt(9)
    everything = tuple(chr(code) for code in range(33, 80))
    engine = make_engine(model=model_with_eos(*range(3, 50)), tokenizer=TOKENIZER)
    seq = make_sequence("a", prompt, min_tokens=7, max_tokens=20)
    run(engine, [seq])
    assert seq.finish_reason is FinishReason.STOP
    assert not set(seq.output_token_ids[:7]) & set(range(3, 50))
    engine = make_engine(tokenizer=TOKENIZER)
    seq = make_sequence("b", prompt, min_tokens=7, max_tokens=20, stop=everything)
    run(engine, [seq])
    assert seq.finish_reason is FinishReason.STOP
    assert seq.num_output_tokens >= 7


def test_min_tokens_counts_the_token_that_stops() -> None:
    """A stop string that the last of ``min_tokens`` tokens completes stops; one token earlier it
    does not."""
    prompt = make_prompt(9)
    future = plain(prompt, **GREEDY).output_token_ids
    at = next(n for n in range(4, 24) if future[n] not in future[:n])
    (stop,) = {TOKENIZER.token_text(future[at])}
    for min_tokens, stops in ((at + 1, True), (at + 2, False)):
        seq = make_sequence("a", prompt, **GREEDY, stop=(stop,), min_tokens=min_tokens)
        run(make_engine(tokenizer=TOKENIZER), [seq])
        assert (seq.num_output_tokens == at + 1) is stops


def stop_in(text: str) -> str:
    """Three letters in the middle that come there first."""
    at = next(n for n in range(len(text) // 2, len(text)) if text.find(text[n : n + 3]) == n)
    return text[at : at + 3]


@pytest.mark.parametrize("includes", [False, True])
def test_stop_strings_across_accepted_drafts(includes: bool) -> None:
    """A stop string that accepted drafts complete in mid-step ends text and tokens exactly where
    plain decoding ends them."""
    prompt, params = make_prompt(9), {"temperature": 0.9, "max_tokens": 40}
    seq = make_sequence("a", prompt, **params)
    text = "".join(output.text for output in run(make_engine(tokenizer=TOKENIZER), [seq]))
    future, stop = seq.token_ids, stop_in(text)
    found = []
    for drafters in ([], [OracleDrafter({"a": future}, length=11)]):
        seq = make_sequence(
            "a", prompt, **params, stop=(stop,), include_stop_str_in_output=includes
        )
        outputs = run(make_engine(drafters, tokenizer=TOKENIZER), [seq])
        assert seq.finish_reason is FinishReason.STOP
        assert [out.stop_reason for out in outputs] == [None] * (len(outputs) - 1) + [stop]
        found.append(("".join(output.text for output in outputs), seq.token_ids, len(outputs)))
    (plain_text, plain_ids, num_plain), (drafted_text, drafted_ids, num_drafted) = found
    assert plain_text == text[: text.index(stop) + (len(stop) if includes else 0)]
    assert (drafted_text, drafted_ids) == (plain_text, plain_ids)
    assert num_drafted < num_plain


def test_held_text_comes_at_the_end() -> None:
    """The beginning of a stop string that never came is part of the last output."""
    prompt = make_prompt(9)
    seq = make_sequence("a", prompt, temperature=0.9)
    text = "".join(output.text for output in run(make_engine(tokenizer=TOKENIZER), [seq]))
    seq = make_sequence("a", prompt, temperature=0.9, stop=(text[-2:] + "\x00",))
    outputs = run(make_engine(tokenizer=TOKENIZER), [seq])
    assert "".join(output.text for output in outputs) == text
    assert outputs[-1].text.endswith(text[-2:])


def test_the_text_goes_on_after_the_prompt() -> None:
    """Prompt and output together are the text, also where a decoder drops the space that a text
    begins with."""
    words = {f"\u2581w{number}": number for number in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(WordLevel(words, unk_token="\u2581w0"))
    backend.decoder = Metaspace()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    seq = make_sequence("a", make_prompt(5), **GREEDY)
    text = "".join(output.text for output in run(make_engine(tokenizer=tokenizer), [seq]))
    assert tokenizer.decode(make_prompt(5)) + text == tokenizer.decode(seq.token_ids)


def test_what_is_done_for_sequences_that_end_is_no_part_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they said is recorded when it is known how long the step took: else prompts that begin
    next would get more time than where nothing is recorded."""
    told: list[str] = []
    engine = make_engine()
    took = engine._scheduler.took

    def note(*arguments: Any) -> None:
        told.append("took")
        took(*arguments)

    monkeypatch.setattr(engine._scheduler, "took", note)
    monkeypatch.setattr(engine, "_on_finish", lambda seq: told.append(seq.request_id))
    run(engine, [make_sequence("a", make_prompt(5), **GREEDY, max_tokens=3)])
    assert told == ["took", "took", "took", "a"]

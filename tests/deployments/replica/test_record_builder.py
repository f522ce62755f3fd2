"""What leaves a replica: plain records of what its engine did."""

from __future__ import annotations

import math
import time

import pytest
import tokenizers
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from deployments.generation import Alternative, GenerationRequest, TokenInfo
from deployments.replica.record_builder import LOWEST_LOGPROB, RecordBuilder
from deployments.replica.request_metrics import RequestMetrics
from hdserve.core import (
    DraftCounts,
    FinishReason,
    SamplingParams,
    Sequence,
    Source,
    StepOutput,
    TokenLogprob,
)
from hdserve.engine.tokenization.tokenizer import Tokenizer
from hdserve.tree import DraftTree


def sequence(choice: int = 0, prompt: tuple[int, ...] = (1, 2, 3)) -> Sequence:
    return Sequence(f"a/b/c/1/{choice}", [*prompt], SamplingParams(), choice_index=choice)


def test_a_step_becomes_a_delta(tokenizer: Tokenizer) -> None:
    """Prompt and choice are those at the end of the id, whatever the client's own id holds."""
    token_id = tokenizer.encode(" table", adds_special_tokens=False)[0]
    data = tokenizer.token_bytes(token_id)
    output = StepOutput(
        sequence(2),
        token_ids=(token_id,),
        sources=(Source.PLAIN,),
        texts=(" table",),
        logprobs=(TokenLogprob(token_id, -0.5, ((token_id, -0.5),)),),
        finish_reason=FinishReason.STOP,
        stop_reason=token_id,
    )
    (delta,) = RecordBuilder(tokenizer, "x").deltas([output], {}, includes_sources=False)
    assert (delta.prompt_index, delta.choice_index) == (1, 2)
    assert (delta.text, delta.token_ids) == (" table", (token_id,))
    assert (delta.finish_reason, delta.stop_reason) == ("stop", token_id)
    alternative = Alternative(data, -0.5, token_id)
    assert delta.logprobs == (TokenInfo(data, -0.5, (alternative,), token_id),)
    assert (delta.texts, delta.draft) == (None, ())


def test_a_delta_says_what_was_sampled_with(tokenizer: Tokenizer) -> None:
    """Which the client need not have said."""
    params = SamplingParams(temperature=0.6, top_p=0.9)
    output = StepOutput(Sequence("a/0/0", [1], params), token_ids=(5,), sources=(Source.PLAIN,))
    (delta,) = RecordBuilder(tokenizer, "x").deltas([output], {}, includes_sources=False)
    assert (delta.temperature, delta.top_p) == (0.6, 0.9)


def test_a_prompts_log_probabilities_come_once(tokenizer: Tokenizer) -> None:
    """With the first delta of one choice, one per token, each as the bytes it stands for; the first
    has none.  Those of a prompt that was computed alone need not be shown."""
    prompt = tuple(tokenizer.encode(" tablé", adds_special_tokens=False))
    scores = [TokenLogprob(token_id, -0.5, ((prompt[0], -0.25),), 7) for token_id in prompt[1:]]
    outputs = [
        StepOutput(sequence(2, prompt), prompt_logprobs=(None, *scores)),
        StepOutput(sequence(2, prompt), token_ids=(5,), sources=(Source.PLAIN,)),
        StepOutput(sequence(0, prompt), prompt_logprobs=(None, *scores)),
    ]
    builder = RecordBuilder(tokenizer, "x")
    for without in builder.deltas(outputs, {}, includes_sources=False):
        assert without.prompt_logprobs == ()
    due_prompts = {0, 1}
    first, *others = builder.deltas(outputs, {}, includes_sources=False, due_prompts=due_prompts)
    assert due_prompts == {0}
    assert len(first.prompt_logprobs) == len(prompt) > 2
    assert b"".join(info.data for info in first.prompt_logprobs) == " tablé".encode()
    assert [info.logprob for info in first.prompt_logprobs] == [None, *[-0.5] * len(scores)]
    assert [info.token_id for info in first.prompt_logprobs] == [*prompt]
    assert [info.rank for info in first.prompt_logprobs] == [None, *[7] * len(scores)]
    top = (Alternative(tokenizer.token_bytes(prompt[0]), -0.25, prompt[0]),)
    assert [info.top for info in first.prompt_logprobs] == [(), *[top] * len(scores)]
    assert [other.prompt_logprobs for other in others] == [(), ()]


@pytest.mark.parametrize("skips", [True, False])
def test_special_tokens_that_are_left_out_of_the_text(tokenizer: Tokenizer, skips: bool) -> None:
    """Are told from those that are part of it."""
    eos = tokenizer.eos_token_id
    assert eos is not None
    params = SamplingParams(skip_special_tokens=skips)
    scores = tuple(TokenLogprob(token_id, -0.5, ()) for token_id in (5, eos))
    output = StepOutput(Sequence("a/0/0", [1], params), (5, eos), logprobs=scores)
    (delta,) = RecordBuilder(tokenizer, "x").deltas([output], {}, includes_sources=False)
    assert delta.logprobs is not None
    assert [info.is_skipped for info in delta.logprobs] == [False, skips]


def test_log_probabilities_are_numbers_that_json_has(tokenizer: Tokenizer) -> None:
    """Of what cannot be, and of a model that overflowed."""
    tops = ((5, -0.5), (6, -math.inf), (7, math.nan))
    output = StepOutput(sequence(), (6,), logprobs=(TokenLogprob(6, math.nan, tops),))
    (delta,) = RecordBuilder(tokenizer, "r").deltas([output], {}, includes_sources=False)
    assert delta.logprobs is not None
    (found,) = delta.logprobs
    assert found.logprob == LOWEST_LOGPROB
    assert [top.logprob for top in found.top] == [-0.5, LOWEST_LOGPROB, LOWEST_LOGPROB]


def verified(tokenizer: Tokenizer) -> StepOutput:
    """A step whose tree begins with a path that the model rejected; the bonus is not in it."""
    ids = tokenizer.encode("a table for two", adds_special_tokens=False)
    tree = DraftTree(3, 8)
    tree.add_path([ids[-1], ids[0]], Source.MODEL)
    tree.add_path(ids[:2], Source.CONTEXT)
    tree.add_path([ids[0], ids[-1]], Source.MODEL)
    return StepOutput(
        sequence(),
        token_ids=tuple(ids[:3]),
        sources=(Source.CONTEXT, Source.CONTEXT, Source.PLAIN),
        texts=("a", " table", " for"),
        draft=tree,
    )


def test_the_verified_tree_says_what_was_accepted(tokenizer: Tokenizer) -> None:
    """The path of the step's tokens, as far as the tree has it."""
    output = verified(tokenizer)
    (delta,) = RecordBuilder(tokenizer, "x").deltas([output], {}, includes_sources=True)
    assert delta.texts == ("a", " table", " for")
    assert [token.is_accepted for token in delta.draft] == [False, False, True, True, False]
    assert [token.parent for token in delta.draft] == [0, 1, 0, 3, 3]
    sources = [Source.MODEL, Source.MODEL, Source.CONTEXT, Source.CONTEXT, Source.MODEL]
    assert [token.source for token in delta.draft] == sources
    assert delta.draft[2].text == tokenizer.token_text(output.token_ids[0])


def test_drafted_tokens_have_their_spaces() -> None:
    """A decoder takes SentencePiece's mark of a space from the first token of a text."""
    vocab = {"<unk>": 0, "\u2581Hello": 1, "\u2581world": 2}
    backend = tokenizers.Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = Metaspace()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    tree = DraftTree(3, 8)
    tree.add_path([1, 2], Source.CONTEXT)
    output = StepOutput(sequence(), (1,), (Source.CONTEXT,), texts=("Hello",), draft=tree)
    (delta,) = RecordBuilder(tokenizer, "x").deltas([output], {}, includes_sources=True)
    assert [token.text for token in delta.draft] == [" Hello", " world"]


def test_parts_of_characters_are_drafted_as_what_stands_for_them(tokenizer: Tokenizer) -> None:
    """As where a byte-level token is decoded alone."""
    ids = tokenizer.encode(" café 🙂", adds_special_tokens=False)
    tree = DraftTree(3, len(ids) + 1)
    tree.add_path(ids, Source.CONTEXT)
    output = StepOutput(sequence(), (5,), (Source.PLAIN,), texts=("a",), draft=tree)
    (delta,) = RecordBuilder(tokenizer, "x").deltas([output], {}, includes_sources=True)
    assert [token.text for token in delta.draft] == [tokenizer.token_text(each) for each in ids]
    assert "\ufffd" in {token.text for token in delta.draft}


def test_what_the_model_rejected_is_not_shown_where_it_may_not(tokenizer: Tokenizer) -> None:
    builder = RecordBuilder(tokenizer, "x", shows_rejected=False)
    output = verified(tokenizer)
    (delta,) = builder.deltas([output], {}, includes_sources=True)
    texts = [tokenizer.token_text(token_id) for token_id in output.token_ids[:2]]
    assert [token.text for token in delta.draft] == texts
    assert [token.parent for token in delta.draft] == [0, 1]
    assert all(token.is_accepted for token in delta.draft)


def test_the_summary_counts_a_prompt_once(tokenizer: Tokenizer) -> None:
    """Outputs and drafts of all choices are added; a prompt is not generated twice."""
    sequences = [sequence(0), sequence(1)]
    for seq, num_accepted in zip(sequences, (2, 3), strict=True):
        seq.num_reused_tokens = 2
        seq.token_ids += [7, 8]
        seq.counts = DraftCounts(num_drafts=1, num_accepted_tokens=num_accepted)
    metrics = RequestMetrics()
    clocks = [metrics.clock(seq, time.monotonic()) for seq in sequences]
    request = GenerationRequest("r", num_choices=2)
    summary = RecordBuilder(tokenizer, "x").summary(request, sequences, clocks)
    assert (summary.num_prompt_tokens, summary.num_reused_tokens) == (3, 2)
    assert (summary.num_output_tokens, summary.drafts.num_accepted_tokens) == (4, 5)
    assert (summary.replica, summary.first_token_s) == ("x", None)
    clocks[1].observe(StepOutput(sequences[1], token_ids=(7,)))
    first_s = RecordBuilder(tokenizer, "x").summary(request, sequences, clocks).first_token_s
    assert first_s == clocks[1].first_token_s is not None

"""Log probabilities of a prompt are those of the stock model, whatever else the engine does."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hdserve import core
from hdserve.core import FinishReason, StepOutput, TokenLogprob
from hdserve.engine.engine import Engine
from hdserve.errors import HdserveError, InvalidRequest, PromptTooLong
from hdserve.models import resolve_model
from tests.drafters import JunkDrafter, OracleDrafter
from tests.engines import make_engine, make_prompt, make_sequence, plain_tokens, run
from tests.models import ARCHITECTURES, MAX_POSITIONS, VOCAB_SIZE, make_model
from tests.sampling import SAMPLING

GREEDY: dict[str, Any] = {"temperature": 0.0}


def make_odd(seq: core.Sequence, position: int) -> None:
    """Put a number into its prompt that models take for a token and scores do not."""
    token_ids: list[Any] = seq.token_ids
    token_ids[position] = Fraction(token_ids[position])


def stock_logprobs(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    """``[len(prompt) - 1, vocab_size]``: what follows each token of the prompt, by transformers."""
    stock: Any = model
    implementation = stock.config._attn_implementation
    stock.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = stock(torch.tensor([prompt]), use_cache=False).logits[0, :-1]
            return torch.as_tensor(logits.double().log_softmax(dim=-1))
    finally:
        stock.set_attn_implementation(implementation)


def scores_of(outputs: list[StepOutput], seq: core.Sequence) -> list[TokenLogprob | None]:
    """They come in the first output of the sequence and in no other."""
    first, *others = [output for output in outputs if output.sequence is seq]
    assert first.prompt_logprobs is not None
    assert all(output.prompt_logprobs is None for output in others)
    return list(first.prompt_logprobs)


def assert_right(
    scores: list[TokenLogprob | None], prompt: list[int], wanted: torch.Tensor, num_top: int
) -> None:
    first, *rest = scores
    assert first is None
    assert len(rest) == len(wanted)
    for score, token_id, row in zip(rest, prompt[1:], wanted, strict=True):
        assert score is not None
        assert score.token_id == token_id
        assert score.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        tokens, values = [*zip(*score.top, strict=True)] if num_top else ((), ())
        assert len(set(tokens)) == num_top
        assert list(values) == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert [float(row[token]) for token in tokens] == pytest.approx(list(values), abs=1e-4)
        # So that a client can ask whether the prompt is what greedy decoding would have given.
        assert dict(score.top).get(token_id, score.logprob) == score.logprob
        if token_id in tokens:
            assert score.rank == tokens.index(token_id) + 1
        else:
            assert score.rank is not None
            # Neighbours closer than rounding may change places.
            near = (row - float(row[token_id])).abs() < 1e-4
            assert abs(score.rank - int((row >= row[token_id]).sum())) < int(near.sum())


@cache
def bundled_model() -> torch.nn.Module:
    """In float32."""
    path = resolve_model("hdserve-tiny")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 256])
def test_they_are_those_of_transformers(chunk_tokens: int) -> None:
    """Of the bundled model, with chunks that cut the prompt anywhere."""
    model = bundled_model()
    prompt = [(7919 * index) % 8000 for index in range(150)]
    wanted = stock_logprobs(model, prompt)
    engine = make_engine(model=model, prefill_chunk_tokens=chunk_tokens)
    seq = make_sequence("a", prompt, **GREEDY, max_tokens=1, prompt_logprobs=3)
    assert_right(scores_of(run(engine, [seq]), seq), prompt, wanted, 3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str) -> None:
    """Windows, caps and heads of all kinds are the stock model's own."""
    model, prompt = make_model(architecture), make_prompt(41)
    wanted = stock_logprobs(model, prompt)
    seq = make_sequence("a", prompt, prompt_logprobs=core.MAX_TOP_LOGPROBS)
    scores = scores_of(run(make_engine(model=model), [seq]), seq)
    assert_right(scores, prompt, wanted, core.MAX_TOP_LOGPROBS)


def test_beside_other_sequences() -> None:
    """Prompts of several lengths that are scored, and others that are not, decode together with
    drafts: each score is that of the prompt alone, each token that of plain decoding."""
    model = make_model()
    sequences = [
        make_sequence(f"{n}", make_prompt(1 + 19 * n, n), seed=n, **options)
        for n, options in enumerate(
            [
                {"prompt_logprobs": 0},
                {"temperature": 0.9},
                {"prompt_logprobs": 2, "temperature": 0.0, "max_tokens": 0},
                {"prompt_logprobs": 5, "temperature": 0.9, "logprobs": 1},
                {"temperature": 0.0},
            ]
        )
    ]
    plain = plain_tokens(model, sequences)
    engine = make_engine([OracleDrafter(plain), JunkDrafter(VOCAB_SIZE)], model=model)
    prompts = [list(seq.token_ids) for seq in sequences]
    outputs = run(engine, sequences)
    assert {seq.request_id: seq.token_ids for seq in sequences} == plain
    for seq, prompt in zip(sequences, prompts, strict=True):
        num_top = seq.params.prompt_logprobs
        if num_top is None:
            assert all(o.prompt_logprobs is None for o in outputs if o.sequence is seq)
        else:
            wanted = stock_logprobs(model, prompt)
            assert_right(scores_of(outputs, seq), prompt, wanted, num_top)


@pytest.mark.parametrize("setting", SAMPLING)
def test_the_answer_stays_the_same(setting: str) -> None:
    """Scoring the prompt changes no token that follows it, however it is chosen."""
    model, prompt = make_model(), make_prompt(30)
    plain = make_sequence("a", prompt, **SAMPLING[setting])
    run(make_engine(model=model), [plain])
    for drafters in ([], [OracleDrafter({"a": plain.token_ids})]):
        seq = make_sequence("a", prompt, **SAMPLING[setting], prompt_logprobs=1)
        run(make_engine(drafters, model=model), [seq])
        assert seq.token_ids == plain.token_ids


def test_neighbours_get_the_same_bits() -> None:
    """In exact mode not even the last bit of what others see depends on a prompt being scored."""
    model = make_model(dtype=torch.float32)

    def logprobs(**options: Any) -> list[TokenLogprob]:
        engine = make_engine(model=model, exact=True)
        assert engine.is_exact
        seq = make_sequence("a", make_prompt(20), **GREEDY, logprobs=3)
        other = make_sequence("b", make_prompt(90, 1), **GREEDY, **options)
        outputs = run(engine, [seq, other])
        return [item for o in outputs if o.sequence is seq for item in o.logprobs or ()]

    assert logprobs() == logprobs(prompt_logprobs=20)


def test_what_is_cached_is_computed_again() -> None:
    """A prompt that is scored reuses nothing, but leaves its rows to those that come later."""
    model, prompt = make_model(), make_prompt(100)
    wanted = stock_logprobs(model, prompt)
    engine = make_engine(model=model)
    run(engine, [make_sequence("before", prompt, **GREEDY)])
    seq = make_sequence("scored", prompt, **GREEDY, max_tokens=0, prompt_logprobs=1)
    assert_right(scores_of(run(engine, [seq]), seq), prompt, wanted, 1)
    assert seq.num_reused_tokens == 0
    assert engine.stats.num_queried_tokens == len(prompt), "those of the sequence before"
    engine.forget_prefixes()
    run(engine, [make_sequence("again", prompt, **GREEDY, max_tokens=0, prompt_logprobs=1)])
    after = make_sequence("after", prompt, **GREEDY)
    run(engine, [after])
    assert after.num_reused_tokens == len(prompt) - 1


@pytest.mark.parametrize("max_tokens", [0, 6])
@pytest.mark.parametrize("num_slots", [2, 8])
def test_choices_share_the_scores_of_their_prompt(max_tokens: int, num_slots: int) -> None:
    """It is scored for one of them, and not again for those that begin later; each has the scores,
    and the answer it has without them."""
    model = make_model()
    prompts = [make_prompt(70, number) for number in range(2)]
    wanted = [stock_logprobs(model, prompt) for prompt in prompts]
    shared = [core.PromptScores() for _ in prompts]

    def choices(name: str, **options: Any) -> list[core.Sequence]:
        found = []
        for prompt_index, choice_index in product(range(2), range(4)):
            prompt = prompts[prompt_index]
            seq = make_sequence(f"{name}{prompt_index}/{choice_index}", prompt, seed=5, **options)
            seq.choice_index = choice_index
            found.append(seq)
        return found

    plain = choices("plain", max_tokens=max(max_tokens, 1))
    run(make_engine(model=model), plain)
    sequences = choices("", max_tokens=max_tokens, prompt_logprobs=2)
    for index, seq in enumerate(sequences):
        seq.prompt_scores = shared[index // 4]
    engine = make_engine(model=model, max_num_sequences=num_slots)
    outputs = run(engine, sequences)
    for index, seq in enumerate(sequences):
        assert_right(scores_of(outputs, seq), prompts[index // 4], wanted[index // 4], 2)
        assert seq.output_token_ids == plain[index].output_token_ids[:max_tokens]
        assert seq.num_reused_tokens == (69 if seq.choice_index else 0)
    assert engine.stats.num_finished == {"length": 8}
    assert engine.stats.kv_cache_usage == 0.0


@pytest.mark.parametrize("ending", ["abort", "fault"])
def test_a_choice_that_goes_away_leaves_the_scoring_to_the_next(ending: str) -> None:
    """Whatever ends the one whose prompt is being scored, the others wait for nobody who is
    gone."""
    model, prompt = make_model(), make_prompt(60)
    engine = make_engine(model=model)
    shared = core.PromptScores()
    sequences = [
        make_sequence(str(number), prompt, **GREEDY, prompt_logprobs=0) for number in range(3)
    ]
    for seq in sequences:
        seq.prompt_scores = shared
        engine.add(seq)
    if ending == "fault":
        make_odd(sequences[0], 30)
    outputs = engine.step()
    assert (engine.stats.num_running, engine.stats.num_waiting) == (1, 2)
    if ending == "abort":
        engine.abort("0")
    outputs += run(engine, [])
    for seq in sequences[1:]:
        assert_right(scores_of(outputs, seq), prompt, stock_logprobs(model, prompt), 0)
    assert sequences[0].finish_reason is (
        FinishReason.ABORT if ending == "abort" else FinishReason.ERROR
    )


def test_others_overtake_a_choice_that_waits_for_scores() -> None:
    """A slot that is free is not kept for it."""
    engine = make_engine(max_num_sequences=2)
    shared = core.PromptScores()
    sequences = [make_sequence(name, make_prompt(60), **GREEDY, prompt_logprobs=0) for name in "ab"]
    for seq in sequences:
        seq.prompt_scores = shared
    other = make_sequence("other", make_prompt(5), **GREEDY, max_tokens=2)
    for seq in (*sequences, other):
        engine.add(seq)
    engine.step()
    assert [seq.admitted_s is None for seq in (*sequences, other)] == [False, True, False]
    run(engine, [])
    assert [seq.num_output_tokens for seq in (*sequences, other)] == [24, 24, 2]


def test_the_prompt_alone() -> None:
    """``max_tokens=0`` gives the scores and no token, of a prompt as long as the context, too."""

    def scored(length: int) -> tuple[Engine, core.Sequence]:
        seq = make_sequence("a", make_prompt(length), max_tokens=0, prompt_logprobs=0)
        engine = make_engine([JunkDrafter(VOCAB_SIZE)])
        (output,) = run(engine, [seq])
        assert output.token_ids == output.sources == ()
        assert output.finish_reason is FinishReason.LENGTH
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == length
        assert not any(score.top for score in output.prompt_logprobs if score)
        assert seq.num_output_tokens == seq.counts.num_steps == 0, "drafters learn nothing of it"
        assert engine.stats.num_prompt_tokens == length
        return engine, seq

    for length in (1, 2, 16, 17, MAX_POSITIONS):
        scored(length)
    engine, _ = scored(5)
    for options in ({"max_tokens": 0}, {"max_tokens": 1}):
        too_long = MAX_POSITIONS + 1 - options["max_tokens"]
        with pytest.raises(PromptTooLong):
            engine.add(make_sequence("b", make_prompt(too_long), **options, prompt_logprobs=0))


def test_a_number_that_is_none_is_refused() -> None:
    """What nobody checked is refused when it is queued, and others go on."""
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="prompt_logprobs must be an integer"):
        engine.add(make_sequence("a", make_prompt(5), prompt_logprobs=1.5))
    assert len(run(engine, [make_sequence("a", make_prompt(5))])) > 0


@pytest.mark.parametrize("position", [1, 20, 39])
def test_what_cannot_be_scored_ends_its_sequence_alone(position: int) -> None:
    """A token of a prompt that is no integer, in any of its chunks: an error of this request; those
    beside it, scored and not, and those that come later have their answers and scores."""
    model = make_model()
    prompts = [make_prompt(40, number) for number in range(3)]
    wanted = stock_logprobs(model, prompts[0])
    scored = make_sequence("scored", prompts[0], **GREEDY, prompt_logprobs=2)
    sequences = [
        make_sequence("bad", prompts[0], **GREEDY, prompt_logprobs=2),
        scored,
        make_sequence("plain", prompts[1], **GREEDY),
        make_sequence("bad, too", prompts[0], **GREEDY, max_tokens=0, prompt_logprobs=0),
        make_sequence("later", prompts[2], **GREEDY),
    ]
    good = [seq for seq in sequences if "bad" not in seq.request_id]
    plain = plain_tokens(model, good)
    futures = {seq.request_id: plain.get(seq.request_id, []) for seq in sequences}
    engine = make_engine([OracleDrafter(futures)], model=model, max_num_sequences=3)
    for seq in sequences:
        engine.add(seq)
        if seq not in good:
            make_odd(seq, position)
    outputs = run(engine, [])
    for seq in sequences:
        if seq not in good:
            (end,) = [output for output in outputs if output.sequence is seq]
            assert (end.finish_reason, end.token_ids) == (FinishReason.ERROR, ())
            assert isinstance(end.error, HdserveError)
    assert {seq.request_id: seq.token_ids for seq in good} == plain
    assert_right(scores_of(outputs, scored), prompts[0], wanted, 2)
    assert engine.stats.num_finished == {"length": 3, "error": 2}
    assert engine.stats.kv_cache_usage == 0.0


def test_drafts_wait_until_the_prompt_is_scored() -> None:
    """One of which the model makes no numbers could not be tried again, nor be told apart from what
    is scored."""
    model, poison = make_model(), 5
    prompt = [token for token in make_prompt(12) if token != poison]
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    alone = make_sequence("a", prompt, temperature=0.0, max_tokens=4, prompt_logprobs=1)
    (wanted, *_) = run(make_engine(model=model), [alone])
    seq = make_sequence("a", prompt, temperature=0.0, max_tokens=4, prompt_logprobs=1)
    (found, *_) = run(make_engine([OracleDrafter({"a": [*prompt, poison]})], model=model), [seq])
    assert seq.token_ids == alone.token_ids
    assert found.prompt_logprobs == wanted.prompt_logprobs

"""Which requests an engine takes, and how long a sequence may become."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hdserve import core
from hdserve.core import FinishReason, SamplingParams
from hdserve.errors import InvalidRequest, PromptTooLong
from tests.drafters import JunkDrafter
from tests.engine.counted_tokens import CountedTokens
from tests.engine.helpers import GREEDY, plain
from tests.engines import make_engine, make_prompt, make_sequence, plain_tokens, run
from tests.models import MAX_POSITIONS, VOCAB_SIZE, make_model


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ([], {}, InvalidRequest, "prompt"),
        ([1] * MAX_POSITIONS, {}, PromptTooLong, "prompt"),
        ([1] * (MAX_POSITIONS + 50), {}, PromptTooLong, "prompt"),
        ([1, VOCAB_SIZE], {}, InvalidRequest, "prompt"),
        ([-1], {}, InvalidRequest, "prompt"),
        ([10**400], {}, InvalidRequest, "prompt"),
        ([1], {"stop_token_ids": (VOCAB_SIZE,)}, InvalidRequest, "stop_token_ids"),
        ([1], {"stop_token_ids": (-1,)}, InvalidRequest, "stop_token_ids"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, InvalidRequest, "logit_bias"),
        ([1], {"logit_bias": {-1: 1.0}}, InvalidRequest, "logit_bias"),
        ([1], {"logit_bias": {10**30: 1.0}}, InvalidRequest, "logit_bias"),
        ([1], {"stop": ("x",)}, InvalidRequest, "stop"),
        ([1], {"allowed_token_ids": (VOCAB_SIZE,)}, InvalidRequest, "allowed_token_ids"),
        (
            [1],
            {"allowed_token_ids": (3, 4), "stop_token_ids": (3, 4), "min_tokens": 1},
            InvalidRequest,
            "min_tokens",
        ),
        (
            [1],
            {"stop_token_ids": tuple(range(VOCAB_SIZE)), "min_tokens": 1},
            InvalidRequest,
            "min_tokens",
        ),
    ],
)
def test_refused_requests_leave_no_trace(
    prompt: list[int], params: dict[str, Any], error: type[InvalidRequest], param: str
) -> None:
    """A request that can never be answered is refused by name, and the engine goes on."""
    engine = make_engine()
    running = make_sequence("r", make_prompt(5), **GREEDY)
    engine.add(running)
    engine.step()
    with pytest.raises(error) as caught:
        engine.add(core.Sequence("a", prompt, SamplingParams(**params)))
    assert type(caught.value) is error
    assert caught.value.param == param
    assert len(caught.value.message) < 200
    assert engine.stats.num_waiting == 0
    run(engine, [make_sequence("a", make_prompt(5), **GREEDY)])
    assert running.token_ids == plain(make_prompt(5), **GREEDY).token_ids


def test_the_tokens_of_a_prompt_are_looked_at_once() -> None:
    """However often a request is checked; not at all where they are known."""
    engine = make_engine()
    for is_known in (False, True):
        prompt = CountedTokens(make_prompt(9))
        seq = core.Sequence("a", prompt, SamplingParams(), is_prompt_checked=is_known)
        for _ in range(2):
            engine.check(seq)
        assert prompt.num_read == (0 if is_known else 9)


def test_an_id_in_use_is_refused() -> None:
    """Two running sequences cannot have one id; afterwards it is free again."""
    engine = make_engine()
    engine.add(make_sequence("a", make_prompt(5)))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(make_sequence("a", make_prompt(5)))
    run(engine, [])
    run(engine, [make_sequence("a", make_prompt(5))])
    assert engine.stats.num_finished == {"length": 2}


def test_all_tokens_may_end_a_sequence() -> None:
    """A request that stops at any token is odd, but has an answer of one token."""
    seq = make_sequence("a", make_prompt(5), stop_token_ids=tuple(range(VOCAB_SIZE)))
    run(make_engine(), [seq])
    assert seq.num_output_tokens == 1
    assert seq.finish_reason is FinishReason.STOP


def test_the_cache_limits_the_context() -> None:
    """Where the cache holds less than the model's context, answers end with the cache, and a
    prompt that leaves no room in it is refused."""
    engine = make_engine([JunkDrafter(VOCAB_SIZE)], kv_cache_tokens=64, max_draft_tokens=12)
    for max_tokens in (None, 500):
        seq = make_sequence("a", make_prompt(30), **GREEDY, max_tokens=max_tokens)
        run(engine, [seq])
        assert len(seq.token_ids) == 64 - 12
        assert seq.finish_reason is FinishReason.LENGTH
    with pytest.raises(PromptTooLong, match="context length is 52 tokens, and the prompt has 52"):
        engine.add(make_sequence("b", make_prompt(52)))


def test_sequences_wait_for_room() -> None:
    """Sequences that do not fit beside each other follow one another; all give their own answer."""
    sequences = [make_sequence(str(n), make_prompt(20, n), **GREEDY) for n in range(4)]
    wanted = plain_tokens(make_model(), sequences)
    engine = make_engine(kv_cache_tokens=64)
    for seq in sequences:
        engine.add(seq)
    engine.step()
    assert (engine.stats.num_running, engine.stats.num_waiting) == (1, 3)
    run(engine, [])
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted
    assert engine.stats.kv_cache_usage == 0.0


def test_a_cache_without_room_for_a_tree_is_refused() -> None:
    """A cache in which no request could ever be answered is an error of the configuration."""
    with pytest.raises(ValidationError, match="no room for one draft tree"):
        make_engine([JunkDrafter(VOCAB_SIZE)], kv_cache_tokens=32, max_draft_tokens=31)
    seq = make_sequence("a", [3], max_tokens=None)
    run(make_engine([JunkDrafter(VOCAB_SIZE)], kv_cache_tokens=32, max_draft_tokens=30), [seq])
    assert seq.num_output_tokens == 1


def test_the_longest_sequence_is_what_model_and_cache_allow() -> None:
    """The smaller of the two is reported, and a sequence gets that far and no further."""
    assert make_engine(max_model_len=40).max_total_tokens == 40
    engine = make_engine([JunkDrafter(VOCAB_SIZE)], kv_cache_tokens=64, max_draft_tokens=12)
    assert engine.max_total_tokens == 64 - 12
    seq = make_sequence("a", make_prompt(3), max_tokens=None)
    run(engine, [seq])
    assert len(seq.token_ids) == engine.max_total_tokens

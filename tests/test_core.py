"""The parameters of a request are checked once, and a sequence counts its tokens."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdserve.core import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_INTEGER,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    FinishReason,
    SamplingParams,
    Sequence,
    Source,
    SpeculationParams,
)
from hdserve.errors import InvalidRequest

RANGES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "temperature": ((0.0, 1e-300, 2.0, 100.0), (-0.1, 100.5, math.inf)),
    "top_p": ((0.0, 1e-9, 0.5, 1.0), (-0.1, -1.0, 1.01)),
    "top_k": ((0, 1, 10**6, MAX_INTEGER), (-1, 2**63, 10**30, math.inf)),
    "min_p": ((0.0, 0.3, 1.0), (-0.1, 1.1)),
    "repetition_penalty": ((0.1, 1.0, 100.0), (0.0, -1.0, 101.0)),
    "presence_penalty": ((-2.0, 0.0, 2.0), (-2.1, 2.1)),
    "frequency_penalty": ((-2.0, 0.0, 2.0), (-2.1, 2.1)),
    "seed": ((-(2**63), 0, 2**64 - 1), (-(2**63) - 1, 2**64, 10**400, -(10**400))),
    "max_tokens": ((1, 10**9, None), (0, -1, 10**30)),
    "min_tokens": ((0, 7), (-1, 10**30)),
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges(name: str) -> None:
    """Values in range are taken; the others, NaN and huge integers too, are refused by name."""
    allowed, refused = RANGES[name]
    for value in allowed:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (*refused, math.nan):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name
        assert name in caught.value.message
        assert len(caught.value.message) < 200


@pytest.mark.parametrize("value", ["no", "false", 0, 1, None])
@pytest.mark.parametrize(
    "name", ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens"]
)
def test_what_is_true_or_false(name: str, value: Any) -> None:
    """And no text, which would be true."""
    assert getattr(SamplingParams(**{name: False}), name) is False
    with pytest.raises(InvalidRequest, match="must be true or false") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["is_enabled", "is_output_shared"])
def test_what_is_true_or_false_of_drafts(name: str) -> None:
    with pytest.raises(InvalidRequest, match="must be true or false") as caught:
        SpeculationParams(**{name: "no"})
    assert caught.value.param == f"speculation.{name}"


def test_more_tokens_than_any_vocabulary_has_cannot_be_allowed() -> None:
    assert SamplingParams(allowed_token_ids=(1,) * MAX_ALLOWED_TOKEN_IDS).needs_logits_processor
    with pytest.raises(InvalidRequest, match="at most 300000 tokens") as caught:
        SamplingParams(allowed_token_ids=(1,) * (MAX_ALLOWED_TOKEN_IDS + 1))
    assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize("token_ids", [[0], [3, 4]])
def test_tokens_of_an_array_are_allowed(token_ids: list[int]) -> None:
    """An array of one zero is false, and one of several numbers is neither."""
    chosen: Any = np.array(token_ids)
    assert SamplingParams(allowed_token_ids=chosen).has_lasting_terms
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        SamplingParams(allowed_token_ids=chosen, grammar="{}")


def test_too_many_stop_strings_are_not_read() -> None:
    with pytest.raises(InvalidRequest, match="at most 64 stop strings"):
        SamplingParams(stop=("",) * 65)


def test_tokens_that_are_allowed_are_no_form() -> None:
    """A grammar says what is allowed itself."""
    assert SamplingParams(allowed_token_ids=(1,)).needs_logits_processor
    assert not SamplingParams(allowed_token_ids=()).needs_logits_processor
    with pytest.raises(InvalidRequest, match="cannot be combined with structured output") as caught:
        SamplingParams(allowed_token_ids=(1,), grammar="g")
    assert caught.value.param == "allowed_token_ids"
    for wrong in (5, True):
        with pytest.raises(InvalidRequest, match="a tuple of token ids"):
            SamplingParams(allowed_token_ids=wrong)  # type: ignore[arg-type]


def test_that_top_k_is_off_is_told() -> None:
    """Others write -1."""
    with pytest.raises(InvalidRequest, match=r"^top_k must be at least 0, which is off, and"):
        SamplingParams(top_k=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 2.5) for name in ("max_tokens", "min_tokens", "seed", "logprobs", "top_k")),
        *((name, "3") for name in ("max_tokens", "seed", "prompt_logprobs", "temperature")),
        *((name, None) for name in ("seed", "min_tokens", "top_k", "temperature", "top_p")),
        ("max_tokens", [3]),
        ("temperature", Decimal("0.5")),
        *(("stop", value) for value in ("###", None, 5, (b"a",), (("a",),))),
        *(("stop_token_ids", value) for value in (None, 5, iter((5,)), "12")),
        *(("allowed_token_ids", value) for value in (5, "12", b"12")),
        *((name, True) for name in RANGES),
        *((name, True) for name in ("logprobs", "prompt_logprobs")),
        ("logit_bias", {5: True}),
        *(("logit_bias", value) for value in (None, [5])),
        ("grammar", {"type": "object"}),
    ],
)
def test_values_of_wrong_types_are_refused(name: str, value: Any) -> None:
    """By name, before they are read as something else."""
    with pytest.raises(InvalidRequest, match=f"{name} must be") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logprobs": MAX_TOP_LOGPROBS + 1}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": MAX_TOP_LOGPROBS + 1}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "max_tokens": -1}, "max_tokens"),
        ({"prompt_logprobs": 0, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)}, "logit_bias"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop": ("a", "b" * (MAX_STOP_CHARACTERS + 1))}, "stop"),
        ({"stop": tuple(map(str, range(MAX_STOP_STRINGS + 1)))}, "stop"),
        ({"stop": ("a" * 129,) * 32}, "stop"),
        ({"logit_bias": {3: 100.5}}, "logit_bias"),
        ({"logit_bias": {3: math.nan}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_combinations_are_refused(options: dict[str, Any], param: str) -> None:
    """Lists, mappings and pairs of parameters are checked, and the error names the parameter."""
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("made", "name", "instead"),
    [
        (SamplingParams, "n", "for several answers to a prompt, repeat it"),
        (SamplingParams, "structured_outputs", r"write grammar=, .* hdserve\.grammar\.json_schema"),
        (SamplingParams, "max_new_tokens", "there are max_tokens, min_tokens, "),
        (SpeculationParams, "enabled", "there are is_enabled, max_draft_tokens, "),
    ],
)
def test_what_others_have_is_refused_by_name(
    made: type[SamplingParams | SpeculationParams], name: str, instead: str
) -> None:
    """With what to write instead, in place of Python's words for a wrong call."""
    unknown: Any = {name: 2}
    told = f"^{made.__name__} takes no '{name}': {instead}"
    with pytest.raises(InvalidRequest, match=told) as caught:
        made(**unknown)
    assert caught.value.param == name


def test_params_can_be_copied_and_pickled() -> None:
    """Parameters cross process boundaries unchanged."""
    for params in (
        SamplingParams(),
        SamplingParams(stop=("a" * MAX_STOP_CHARACTERS,) * 16, logit_bias={1: 2.0}, seed=2**63),
    ):
        assert pickle.loads(pickle.dumps(params)) == params
        assert copy.deepcopy(params) == params
        assert dataclasses.replace(params, top_k=4).top_k == 4


def test_params_are_frozen() -> None:
    """Nobody changes the parameters of a request that runs."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "needs_processor"),
    [
        ({}, False),
        ({"temperature": 0.3, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"logit_bias": {1: 1.0}}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_who_needs_a_logits_processor_is_recognised(
    options: dict[str, Any], needs_processor: bool
) -> None:
    """The fast path for choices by the logits alone is taken exactly where it is right."""
    assert SamplingParams(**options).needs_logits_processor is needs_processor


def test_greedy_is_temperature_zero() -> None:
    """Only temperature 0 is greedy."""
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=1e-300).is_greedy


def test_speculation_allows_named_sources() -> None:
    """``databases`` is a list of what may draft; ``None`` is everything, an empty list nothing."""
    assert all(SpeculationParams().allows(source) for source in Source)
    chosen = SpeculationParams(databases=frozenset({"model"}))
    assert [source for source in Source if chosen.allows(source)] == [Source.MODEL]
    assert not any(SpeculationParams(databases=frozenset()).allows(source) for source in Source)


@pytest.mark.parametrize("databases", [{"contexts"}, ["model", 5], "model", {"plain"}, 5, iter(())])
def test_speculation_sources_are_checked(databases: Any) -> None:
    """One that is misspelt would draft nothing, and a text is no collection of labels."""
    with pytest.raises(InvalidRequest, match="there are context, model,") as caught:
        SpeculationParams(databases=databases)
    assert caught.value.param == "speculation.databases"


def test_speculation_limit_is_checked() -> None:
    """A number of drafts below 0 or beyond all counts is refused by its full name."""
    assert SpeculationParams(max_draft_tokens=0).max_draft_tokens == 0
    for number in (-1, 10**30):
        with pytest.raises(InvalidRequest) as caught:
            SpeculationParams(max_draft_tokens=number)
        assert caught.value.param == "speculation.max_draft_tokens"


@given(prompt=st.lists(st.integers(0, 60), min_size=1), output=st.lists(st.integers(0, 60)))
def test_sequence_counts(prompt: list[int], output: list[int]) -> None:
    """What is prompt, output, pending and remaining adds up however long the output is."""
    seq = Sequence("a", list(prompt), SamplingParams())
    seq.max_total_tokens = len(prompt) + len(output) + 3
    seq.num_cached_tokens = len(prompt) - 1
    for token_id in output:
        seq.token_ids.append(token_id)
    assert seq.num_prompt_tokens == len(prompt)
    assert seq.output_token_ids == output
    assert seq.num_output_tokens == len(output)
    assert seq.num_pending_tokens == len(output) + 1
    assert seq.num_remaining_tokens == 3


def test_sequences_compare_by_identity() -> None:
    """Two requests with equal contents are two requests; state of one is not the other's."""
    one, other = (Sequence("a", [1], SamplingParams()) for _ in range(2))
    assert one != other
    one.counts.accepted_by_depth[Source.MODEL] = [1]
    one.drafter_state["x"] = 1
    assert not other.counts.accepted_by_source
    assert not other.drafter_state


def test_labels_are_lower_case_and_distinct() -> None:
    """The labels of sources are those the API documents; reasons are the API's words."""
    labels = [source.label for source in Source]
    assert labels == ["plain", "context", "model", "statistics", "recycled", "other", "grammar"]
    assert str(FinishReason.LENGTH) == "length"

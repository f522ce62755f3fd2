"""A model in this process."""

from __future__ import annotations

import pytest

from hdserve import LLM, SamplingParams
from hdserve.core import Source
from hdserve.errors import ConfigError


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'engine'"):
        LLM("hdserve-mini", engin={})


def test_what_is_remembered_is_drafted_from() -> None:
    """The answer of another process comes in fewer steps, and is the same."""
    prompts = ["A table for two in"]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    options = {"engine": {"compile": False}, "drafting": {"adapts_budget": False}}
    (first,) = LLM("hdserve-mini", **options).generate(prompts, params)
    assert Source.MODEL not in first.counts.accepted_by_source
    llm = LLM("hdserve-mini", **options)
    llm.remember([first.token_ids])
    (again,) = llm.generate(prompts, params)
    assert again.token_ids == first.token_ids
    assert again.counts.accepted_by_source[Source.MODEL] > 0
    assert again.counts.num_steps < first.counts.num_steps

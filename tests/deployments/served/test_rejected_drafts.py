"""Guesses that a model rejected are not shown where its configuration says so."""

from __future__ import annotations

from typing import Any

import openai
import pytest

pytestmark = pytest.mark.ray


def test_only_what_was_accepted_is_shown(client: openai.OpenAI) -> None:
    """Though more was drafted: what others generated may be in it."""
    options: dict[str, Any] = {
        "model": "assistant",
        "messages": [{"role": "user", "content": "I want to book a table for two in San Jose."}],
        "max_tokens": 60,
        "stream": True,
        "stream_options": {"include_usage": True, "include_sources": True},
        "extra_body": {"ignore_eos": True},
    }
    *chunks, last = client.chat.completions.create(**options)
    counts = (last.model_extra or {})["metrics"]["speculative_decoding"]
    extra = [chunk.choices[0].model_extra or {} for chunk in chunks]
    shown = [node["accepted"] for step in extra for node in step["draft"]]
    assert counts["num_draft_tokens"] > counts["num_accepted_draft_tokens"] > 0
    assert shown
    assert all(shown)

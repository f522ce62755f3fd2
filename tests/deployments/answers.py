"""Records of answers, and what is built from them."""

from __future__ import annotations

import json
from typing import Any

from deployments.generation import Delta, Summary
from deployments.http.json_answer import json_pieces
from deployments.openai.completion_builder import AnswerFormat, CompletionBuilder
from hdserve.core import DraftCounts, Source

COUNTS = DraftCounts(
    num_steps=5,
    num_drafts=4,
    num_draft_tokens=20,
    num_accepted_tokens=6,
    accepted_by_depth={Source.MODEL: [0, 2], Source.CONTEXT: [3, 0, 1]},
    draft_tokens_by_source={Source.MODEL: 10, Source.CONTEXT: 10},
    num_drafts_by_accepted=[1, 1, 1, 1],
)
SUMMARY = Summary(
    num_prompt_tokens=7, num_output_tokens=11, drafts=COUNTS, replica="abc", first_token_s=0.25
)


def delta(text: str, choice: int = 0, prompt: int = 0, **fields: Any) -> Delta:
    """One token of an answer."""
    defaults: dict[str, Any] = {
        "token_ids": (1,),
        "sources": (0,),
        "logprobs": None,
        "finish_reason": None,
    }
    return Delta(prompt_index=prompt, choice_index=choice, text=text, **{**defaults, **fields})


def builder(form: AnswerFormat, num_choices: int = 1) -> CompletionBuilder:
    """Of an answer in ``form``."""
    return CompletionBuilder(form, "the-model", "r1", num_choices)


def collected(form: AnswerFormat, *deltas: Delta, num_choices: int = 1) -> dict[str, Any]:
    """The whole answer that ``deltas`` and ``SUMMARY`` make, as a client reads it."""
    made = builder(form, num_choices)
    for item in deltas:
        made.collect(item)
    found: dict[str, Any] = json.loads(b"".join(json_pieces(made.whole(SUMMARY))))
    return found

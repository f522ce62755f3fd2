"""What answers of every route have in the OpenAI API: errors, usage, metrics."""

from __future__ import annotations

from typing import Any

from deployments.generation import Summary
from hdserve.errors import HdserveError, Overloaded, RequestError

STREAM_END = b"data: [DONE]\n\n"


def error_body(error: HdserveError) -> dict[str, Any]:
    """Return the ``error`` object of the OpenAI API; ``code`` is a slug."""
    is_client_error = 400 <= error.status < 500
    kind = "invalid_request_error" if is_client_error else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": "rate_limit_error" if isinstance(error, Overloaded) else kind,
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error.code,
        }
    }


def token_counts(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """Return the beginning of a ``usage`` object."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def usage(summary: Summary) -> dict[str, Any]:
    """Return the ``usage`` object."""
    found: dict[str, Any] = {
        **token_counts(summary.num_prompt_tokens, summary.num_output_tokens),
        "prompt_tokens_details": {"cached_tokens": summary.num_reused_tokens},
    }
    details = {}
    if summary.prediction is not None:
        details["accepted_prediction_tokens"] = summary.prediction.num_accepted_tokens
        details["rejected_prediction_tokens"] = summary.prediction.num_rejected_tokens
    if summary.num_reasoning_tokens is not None:
        details["reasoning_tokens"] = summary.num_reasoning_tokens
    if details:
        found["completion_tokens_details"] = details
    return found


def metrics(summary: Summary) -> dict[str, Any]:
    """Return what drafting did, by the field names of vLLM and, where there were no drafts, with
    its numbers; with accepted tokens by source, which replica it was, and how long its first token
    took."""
    counts = summary.drafts
    num_drafted = counts.num_draft_tokens
    rate = counts.num_accepted_tokens / num_drafted if num_drafted else 0.0
    length = counts.mean_acceptance_length
    return {
        "replica": summary.replica,
        "time_to_first_token_s": _rounded(summary.first_token_s, 6),
        "speculative_decoding": {
            "mean_acceptance_length": 1.0 if length is None else round(length, 4),
            "draft_acceptance_rate": round(rate, 4),
            "acceptance_histogram": counts.num_drafts_by_accepted,
            "num_spec_steps": counts.num_drafts,
            "num_steps": counts.num_steps,
            "num_draft_tokens": num_drafted,
            "num_accepted_draft_tokens": counts.num_accepted_tokens,
            "accepted_by_source": {
                source.label: count for source, count in sorted(counts.accepted_by_source.items())
            },
        },
    }


def _rounded(value: float | None, num_digits: int) -> float | None:
    return None if value is None else round(value, num_digits)

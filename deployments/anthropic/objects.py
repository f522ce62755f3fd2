"""What all answers of the Messages API have in common: errors and usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.generation import Summary
from hdserve.errors import HdserveError, PromptTooLong

_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status, but for the general ones."""


def error_body(
    error: HdserveError, request_id: str | None, status: int | None = None
) -> dict[str, Any]:
    """Return the error object of this API.

    Args:
        request_id: of the request that failed, if it came with one.
        status: with which it is answered, where that is not its own.
    """
    status = status or error.status
    general = "invalid_request_error" if 400 <= status < 500 else "api_error"
    told = {"type": _ERROR_TYPES.get(status, general), "message": _message(error)}
    return {"type": "error", "error": told, "request_id": request_id}


def _message(error: HdserveError) -> str:
    """Return what is told.  Of a prompt that is too long it begins as with Anthropic, as clients
    look for these words to shorten the conversation."""
    if isinstance(error, PromptTooLong) and error.num_tokens is not None:
        counts = f"{error.num_tokens} tokens > {error.max_num_tokens} maximum"
        return f"prompt is too long: {counts}: {error.message}"
    return error.message


def token_counts(num_prompt: int, num_reused: int, num_output: int) -> dict[str, Any]:
    """Return the beginning of a ``usage`` object, in which ``input_tokens`` are those that were not
    cached."""
    return {
        "input_tokens": num_prompt - num_reused,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_reused,
        "output_tokens": num_output,
    }


def usage(summary: Summary) -> dict[str, Any]:
    """Return the ``usage`` object."""
    found = token_counts(
        summary.num_prompt_tokens, summary.num_reused_tokens, summary.num_output_tokens
    )
    if summary.num_reasoning_tokens is not None:
        found["output_tokens_details"] = {"thinking_tokens": summary.num_reasoning_tokens}
    return found

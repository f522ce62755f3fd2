"""Every sampling parameter alone, and all of them together."""

from __future__ import annotations

from typing import Any

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.6},
    "top_k": {"temperature": 1.2, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.3, "min_p": 0.1},
    "all filters": {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 0.8, "repetition_penalty": 1.3},
    "presence": {"temperature": 0.8, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 1.2},
    "bias": {"temperature": 1.0, "logit_bias": {3: 5.0, 7: -100.0, 11: 2.5}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": (3, 7, 11, 30)},
    "min_tokens": {"temperature": 1.0, "stop_token_ids": (4, 8, 15, 16, 23), "min_tokens": 12},
    "logprobs": {"temperature": 1.0, "logprobs": 4},
    "everything": {
        "temperature": 0.9,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "logit_bias": {5: 3.0},
        "stop_token_ids": (2, 44),
        "min_tokens": 5,
        "logprobs": 2,
    },
}

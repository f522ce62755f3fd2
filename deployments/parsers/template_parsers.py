"""Choosing the parsers of a model's output by its chat template."""

from __future__ import annotations

import re

AUTO = "auto"
"""The value in a configuration that selects the parser by the chat template."""

_HARMONY = "<|channel|>"
_LLAMA_CALL = re.compile(r'\{\\?"name\\?": [^{}"\\]*, \\?"parameters\\?":')
"""How the templates of Llama 3 ask for calls; quotes in a Jinja string may have a backslash."""


def tool_parser_of(template: str) -> str | None:
    """Return the name of the parser of the calls that ``template`` asks for; ``None`` if there is
    none."""
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if _HARMONY in template:
        return "harmony"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<|tool_call>" in template:
        return "gemma"
    if "<|tool_call|>" in template:
        return "granite"
    if "<tool_call>" in template:
        if "<function=" in template and "<parameter=" in template:
            return "qwen3_coder"
        if "<tool_sep>" in template:  # of Hunyuan
            return None
        return "glm" if "<arg_key>" in template else "hermes"
    if "<|python_tag|>" in template or _LLAMA_CALL.search(template):
        return "llama3_json"
    return None


def reasoning_parser_of(template: str) -> str | None:
    """Return the name of the parser of the reasoning marks in ``template``, if it has any."""
    if _HARMONY in template:
        return "harmony"
    if "[THINK]" in template:
        return "mistral"
    if "<|channel>" in template:
        return "gemma"
    return "think" if "<think>" in template or "</think>" in template else None

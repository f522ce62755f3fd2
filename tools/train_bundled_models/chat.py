"""The chat format of the bundled models: special tokens and template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import Environment

END_OF_TEXT = "<|endoftext|>"
"""Token 0: separates documents; also the padding token."""

TURN_START = "<|im_start|>"
"""Token 1: begins a turn and is followed by the role."""

TURN_END = "<|im_end|>"
"""Token 2: ends a turn; the end-of-sequence token."""

SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The options with which transformers renders chat templates.
_TEMPLATE = Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)


def render_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the text of a conversation, every turn closed."""
    return _TEMPLATE.render(messages=messages, add_generation_prompt=False)

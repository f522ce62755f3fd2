"""Prompts as a model reads them, cut to the room it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hdserve.arguments import naming
from hdserve.conversation import for_template
from hdserve.errors import ConfigError
from hdserve.prompts import Messages, PromptRow

if TYPE_CHECKING:
    from hdserve.engine.tokenization.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The token ids of one prompt.

    Attributes:
        is_cut: whether the beginning of its text was left out to make it fit.
    """

    row: PromptRow
    token_ids: tuple[int, ...]
    is_cut: bool


def longest_prompt(max_model_len: int, max_tokens: int) -> int:
    """Return how many tokens of the context ``--max-tokens`` leaves for a prompt.

    Raises:
        ConfigError: it leaves none.
    """
    if max_tokens >= max_model_len:
        raise ConfigError(
            f"--max-tokens {max_tokens} leaves nothing for a prompt of the {max_model_len} tokens "
            "that the model and its cache hold"
        )
    return max_model_len - max_tokens


def encode_prompts(
    rows: Iterable[PromptRow], tokenizer: Tokenizer, longest: int
) -> Iterator[EncodedPrompt]:
    """Encode the rows of a file, each as :func:`encode_prompt` does.

    Raises:
        ConfigError: not even empty texts fit.
        InvalidRequest: a row cannot be used; the message names it, counting from 1.
    """
    for number, row in enumerate(rows, 1):
        with naming(f"row {number}"):
            encoded = encode_prompt(row, tokenizer, longest)
        yield encoded


def encode_prompt(row: PromptRow, tokenizer: Tokenizer, longest: int) -> EncodedPrompt:
    """Render ``row`` as a chat of at most ``longest`` tokens, cut at the front: text of the
    first messages is removed before any of later ones.

    Raises:
        ConfigError: not even empty texts fit.
        InvalidRequest: a message has content other than text, or the template refuses it.
    """
    messages: Messages = for_template(row.messages)
    is_cut = False
    while True:
        token_ids = tokenizer.encode_chat(messages, {})
        num_over = len(token_ids) - longest
        if num_over <= 0:
            return EncodedPrompt(row, tuple(token_ids), is_cut)
        messages, is_cut = _cut(messages, num_over, longest, tokenizer), True


def _cut(
    messages: Messages, num_over: int, longest: int, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return ``messages`` with about that many tokens of the first text removed, whole characters
    and at least one, or all it has."""
    shorter = [dict(message) for message in messages]
    message = next(_with_text(shorter), None)
    if message is None:
        raise ConfigError(
            f"the chat template alone has more than {longest} tokens; a smaller --max-tokens "
            "leaves room for more"
        )
    text = message["content"]
    kept = tokenizer.encode(text, adds_special_tokens=False)[num_over:]
    shown = tokenizer.decode(kept).lstrip(_REPLACEMENT)  # it may begin within a character
    num_removed = max(1, len(text) - len(shown))
    message["content"] = text[num_removed:]
    return shorter


def _with_text(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (item for item in messages if item["content"])

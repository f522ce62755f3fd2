"""Prompt files: one JSON object per line with the ``turns`` of a conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hdserve.errors import ConfigError

_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a file of another form may raise."""


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer here."""

    def encode(self, text: str, *, adds_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def encode_chat(
        self, messages: list[dict[str, str]], template_options: dict[str, str]
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class PromptRow:
    """The first turn of one line.

    Attributes:
        task: the group for figures by task; ``all`` when the file names none.
    """

    name: str
    task: str
    text: str


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The token ids of one prompt.

    Attributes:
        is_cut: whether the beginning of the user's text was left out to make it fit.
    """

    row: PromptRow
    token_ids: tuple[int, ...]
    is_cut: bool


def read_prompts(path: Path, limit: int | None = None) -> list[PromptRow]:
    """The first turn of each line of a JSONL file.

    Raises:
        ConfigError: the file cannot be read or has no turns.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()][:limit]
        return [
            PromptRow(
                str(row.get("question_id", index)),
                str(row.get("task", row.get("category", "all"))),
                str(row["turns"][0]),
            )
            for index, row in enumerate(rows)
        ]
    except _ERRORS as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        wanted = '{"turns": ["a question"]}'
        raise ConfigError(f"{path}: not a prompt file, lines like {wanted}: {reason}") from error


def encode_prompt(row: PromptRow, tokenizer: ChatTokenizer, max_tokens: int) -> EncodedPrompt:
    """Render ``row`` as a chat of at most ``max_tokens`` tokens, cut at the front of its text.

    Raises:
        ConfigError: not even an empty text fits.
    """
    text, is_cut = row.text, False
    while True:
        token_ids = tokenizer.encode_chat([{"role": "user", "content": text}], {})
        num_over = len(token_ids) - max_tokens
        if num_over <= 0:
            return EncodedPrompt(row, tuple(token_ids), is_cut)
        if not text:
            raise ConfigError(f"the chat template alone has more than {max_tokens} tokens")
        kept = tokenizer.encode(text, adds_special_tokens=False)[num_over:]
        text, is_cut = tokenizer.decode(kept), True

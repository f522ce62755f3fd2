"""Files of prompts: JSON Lines, for every command that takes prompts.

A row asks in one of three ways::

    {"prompt": "a question"}                                a text
    {"messages": [{"role": "user", "content": "..."}]}      a conversation, as the OpenAI API has it
    {"turns": ["a question", "another one"]}                texts, of which the first is asked

and may give its ``question_id`` and its ``task`` (or ``category``).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hdserve.errors import ConfigError
from hdserve.journal import digest_of_list

Messages = Sequence[Mapping[str, Any]]

_WANTED = "an object with `prompt`, `messages` or `turns` is expected"
_BATCH = (
    "a request of OpenAI's Batch API, whose `body` is not read: write `messages` or `prompt` in "
    "the row itself, and options for the command"
)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """The prompt in one row.

    Attributes:
        name: the row's ``question_id``, else its number from 0 on.
        task: the group for figures by task; ``all`` if the row names none.
        text: the prompt; empty if it is a conversation.
        conversation: the messages of one, else empty.
        fields: the row as it is in the file.
        place: the file and the line.
    """

    name: str
    task: str
    text: str
    conversation: Messages = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""

    @property
    def messages(self) -> Messages:
        """The chat for this prompt."""
        return self.conversation or [{"role": "user", "content": self.text}]


def read_prompts(path: Path, limit: int | None = None) -> list[PromptRow]:
    """Read the first ``limit`` rows of a file, at least one.

    Raises:
        ConfigError: the file cannot be read, a row has no prompt, or there are no rows.
    """
    try:
        opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig") as file:
            rows = list(islice(_rows(file, path), limit))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the prompts {path}: {reason}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the prompts {path}: not UTF-8 text") from error
    if not rows:
        raise ConfigError(f"{path}: it contains no prompts")
    return rows


def rows_digest(rows: Sequence[PromptRow]) -> str:
    """Return a short digest of the rows of a file, for the settings of a job: a pipe cannot be read
    again for a digest of the file."""
    return digest_of_list(dict(row.fields) for row in rows)


def _rows(lines: Iterable[str], path: Path) -> Iterator[PromptRow]:
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    for index, (number, line) in enumerate(numbered):
        yield _row(line, index, f"{path}, line {number}")


def _row(line: str, index: int, where: str) -> PromptRow:
    try:
        fields = json.loads(line)
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: half of a surrogate pair, which is not text") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON; {_WANTED}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: {_WANTED}")
    name = _given(fields, ("question_id",), index)
    task = _given(fields, ("task", "category"), "all")
    conversation = _conversation(fields.get("messages"), where)
    text = "" if conversation else _text(fields, where)
    return PromptRow(str(name), str(task), text, conversation, fields, where)


def _given(fields: Mapping[str, Any], names: Iterable[str], default: Any) -> Any:
    """Return the first of these fields that is neither missing nor null."""
    return next((fields[name] for name in names if fields.get(name) is not None), default)


def _conversation(messages: Any, where: str) -> Messages:
    """Return the ``messages`` of a row after checking them; empty if it has none."""
    if not messages:
        return ()
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ConfigError(f"{where}: `messages` are objects with a `role` and `content`")
    return messages


def _is_message(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("role"), str):
        return False
    return "content" in found or bool(found.get("tool_calls"))


def _text(fields: Mapping[str, Any], where: str) -> str:
    turns = fields.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else fields.get("prompt")
    if not isinstance(text, str) and isinstance(fields.get("body"), dict):
        raise ConfigError(f"{where}: {_BATCH}; {_WANTED}")
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {_WANTED}")
    return text

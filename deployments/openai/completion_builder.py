"""From the records of a model server to the objects and chunks of chats and completions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from deployments.generation import Delta, Summary
from deployments.openai.answer import Answer
from deployments.openai.chat_format import ChatFormat
from deployments.openai.completion_format import CompletionFormat
from deployments.openai.objects import error_body, metrics, token_counts, usage
from hdserve.core import Source
from hdserve.errors import HdserveError

AnswerFormat = ChatFormat | CompletionFormat


class CompletionBuilder:
    """Builds the objects of one chat or completion, which share an id and a time.

    Args:
        includes_usage: whether a stream ends with a chunk of usage, which is null in those before.
        counts_in_chunks: whether it is the tokens so far instead, of the choice of the chunk.
    """

    def __init__(
        self,
        form: AnswerFormat,
        model: str,
        request_id: str,
        num_choices: int,
        *,
        includes_usage: bool = False,
        counts_in_chunks: bool = False,
    ) -> None:
        self._form = form
        self._includes_usage = includes_usage
        self._counts_in_chunks = counts_in_chunks
        self._num_choices = num_choices
        self._head = {
            "id": f"{form.prefix}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }
        self._answers: dict[int, Answer] = {}
        self._has_begun = False
        self._num_tokens: Counter[int] = Counter()
        """The number of tokens of each choice of a stream so far."""
        self._prompts: dict[int, Delta] = {}
        """By the index of a prompt, the first delta of all its choices."""

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks of one delta: one, but two where a tool call begins and goes on, and
        none where it has nothing to show.  Before the first of all come those of the roles."""
        index = self._index(delta)
        is_first = index not in self._num_tokens
        if is_first:
            delta = self._with_prompt(delta)
        self._num_tokens[index] += len(delta.token_ids)
        choices = self._form.deltas(delta, index, is_first=is_first)
        sources = _sources(delta)
        for choice in choices[:-1]:
            choice.update({name: [] for name in sources})
        choices[-1] |= sources
        chunks = [
            self._chunk(choice, delta.num_prompt_tokens, self._num_tokens[index])
            for choice in choices
            if self._counts_in_chunks or _has_content(choice)
        ]
        if self._has_begun or not chunks:
            return chunks
        self._has_begun = True
        return self._opened(chunks, delta)

    def _opened(self, chunks: list[dict[str, Any]], delta: Delta) -> list[dict[str, Any]]:
        """Return the first chunks of a stream, made of ``delta``, behind those of the roles."""
        (first,) = chunks[0]["choices"]
        roles = self._form.opening(first, self._num_choices)
        for role in roles:
            role.update({name: [] for name in _sources(delta)})
        opened = [*(self._chunk(role, delta.num_prompt_tokens, 0) for role in roles), *chunks]
        opened[0] |= self._form.beside_delta(self._prompts[delta.prompt_index])
        return opened

    def _chunk(
        self, choice: dict[str, Any], num_prompt_tokens: int, num_tokens: int
    ) -> dict[str, Any]:
        chunk = {**self._head, "object": self._form.chunk_kind, "choices": [choice]}
        if self._counts_in_chunks:
            chunk["usage"] = token_counts(num_prompt_tokens, num_tokens)
        elif self._includes_usage:
            chunk["usage"] = None
        return chunk

    def end(self, summary: Summary) -> list[dict[str, Any]]:
        """Return the chunk after the last delta, if asked for: no choices, but usage and what
        drafting did."""
        if not self._includes_usage:
            return []
        chunk = {
            **self._head,
            "object": self._form.chunk_kind,
            "choices": [],
            "usage": usage(summary),
            "metrics": metrics(summary),
        }
        return [chunk]

    def fail(self, error: HdserveError) -> list[dict[str, Any]]:
        """Return the error, instead of what has not come."""
        return [error_body(error)]

    def collect(self, delta: Delta) -> None:
        """Add a delta to the whole answer."""
        index = self._index(delta)
        if index not in self._answers:
            delta = self._with_prompt(delta)
            self._answers[index] = Answer(delta.prompt_index)
        self._answers[index].add(delta)

    @property
    def size(self) -> int:
        return sum(answer.size for answer in self._answers.values())

    def whole(self, summary: Summary) -> dict[str, Any]:
        """Return the answer in one object."""
        return {
            **self._head,
            "object": self._form.kind,
            "choices": [
                self._form.choice(answer, index) for index, answer in sorted(self._answers.items())
            ],
            **self._form.beside_choices(self._answers),
            "usage": usage(summary),
            "metrics": metrics(summary),
        }

    def _with_prompt(self, delta: Delta) -> Delta:
        """Return the first delta of a choice with what is known of its prompt, which came once."""
        first = self._prompts.setdefault(delta.prompt_index, delta)
        return delta._replace(
            prompt_logprobs=first.prompt_logprobs, prompt_token_ids=first.prompt_token_ids
        )

    def _index(self, delta: Delta) -> int:
        return delta.prompt_index * self._num_choices + delta.choice_index


def _has_content(choice: Mapping[str, Any]) -> bool:
    """Whether the entry of a chunk tells a client anything."""
    names = ("delta", "text", "logprobs", "finish_reason", "token_sources", "draft", "token_ids")
    return any(choice.get(name) for name in names)


def _sources(delta: Delta) -> dict[str, Any]:
    """Return where the tokens of a chunk came from, and the draft they were verified with, if the
    request asked for it.

    In ``draft`` the ``parent`` of an entry is the index of the entry before it on its path, and -1
    for those that follow the last token.
    """
    if delta.texts is None:
        return {}
    tokens = zip(delta.texts, delta.sources, strict=True)
    return {
        "token_sources": [
            {"text": text, "source": Source(source).label} for text, source in tokens
        ],
        "draft": [
            {
                "text": token.text,
                "source": Source(token.source).label,
                "parent": token.parent - 1,
                "accepted": token.is_accepted,
            }
            for token in delta.draft
        ],
    }

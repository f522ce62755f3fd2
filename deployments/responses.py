"""Answers in the OpenAI API's shape, built from the records of a model server."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from deployments.generation import Alternative, Delta, Summary, TokenInfo
from deployments.prompt_logprobs import shown_prompt
from deployments.tool_parsers import ToolParser
from deployments.tool_reader import ToolReader
from hdserve.core import Source
from hdserve.errors import HdserveError, Overloaded, RequestError

STREAM_END = b"data: [DONE]\n\n"

_new_decoder = codecs.getincrementaldecoder("utf-8")


def server_sent_event(data: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def error_body(error: HdserveError) -> dict[str, Any]:
    """The ``error`` object of the OpenAI API; ``code`` is a slug."""
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


def usage(summary: Summary) -> dict[str, Any]:
    """The ``usage`` object."""
    found: dict[str, Any] = {
        "prompt_tokens": summary.num_prompt_tokens,
        "completion_tokens": summary.num_output_tokens,
        "total_tokens": summary.num_prompt_tokens + summary.num_output_tokens,
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
    """What drafting did, by the field names of vLLM, with accepted tokens by source, which replica
    it was, and how long its first token took."""
    counts = summary.drafts
    first_token_s = summary.first_token_s
    return {
        "replica": summary.replica,
        "time_to_first_token_s": None if first_token_s is None else round(first_token_s, 6),
        "speculative_decoding": {
            "mean_acceptance_length": _ratio(
                counts.num_accepted_tokens + counts.num_drafts, counts.num_drafts
            ),
            "draft_acceptance_rate": _ratio(counts.num_accepted_tokens, counts.num_draft_tokens),
            "acceptance_histogram": counts.num_drafts_by_accepted,
            "num_spec_steps": counts.num_drafts,
            "num_steps": counts.num_steps,
            "num_draft_tokens": counts.num_draft_tokens,
            "num_accepted_draft_tokens": counts.num_accepted_tokens,
            "accepted_by_source": {
                source.label: count for source, count in sorted(counts.accepted_by_source.items())
            },
        },
    }


def _sources(delta: Delta) -> dict[str, Any]:
    """Where the tokens of a chunk came from, and the draft they were verified with, if the request
    asked for it.

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


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


class ChatFormat:
    """``chat.completion`` objects and chunks.

    Args:
        tool_parser: reads tool calls; ``None`` leaves the text as it is.
        is_one_call: whether calls after the first are dropped.
        is_named_call: whether the request named the function to call.
        num_prompt_logprobs: how many of the likeliest tokens a whole answer shows at each place of
            the prompt; ``None`` shows nothing of it.
    """

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        tool_parser: type[ToolParser] | None = None,
        *,
        is_one_call: bool = False,
        is_named_call: bool = False,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._num_prompt_logprobs = num_prompt_logprobs
        self._make_reader = partial(
            ToolReader, tool_parser, is_one_call=is_one_call, is_named=is_named_call
        )
        self._readers: dict[int, ToolReader] = {}

    def deltas(self, delta: Delta, index: int, *, is_first: bool) -> list[dict[str, Any]]:
        """The ``choices`` entries of the chunks of a delta: calls begin in one, and what is there
        of their arguments follows in another."""
        reader = self._readers.setdefault(index, self._make_reader())
        text, begun, arguments = reader.read(delta.text, is_last=delta.finish_reason is not None)
        message: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if text or is_first:
            message["content"] = text
        calls = begun or arguments
        if calls:
            message["tool_calls"] = calls
        messages = [message]
        if begun and arguments:
            messages.append({"tool_calls": arguments})
        entries: list[dict[str, Any]] = [
            {"index": index, "delta": message, "logprobs": None, "finish_reason": None}
            for message in messages
        ]
        entries[-1] |= {
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": reader.finish_reason(delta.finish_reason),
        }
        return entries

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        """The ``choices`` entry of a whole answer."""
        reader = self._make_reader()
        text, calls = reader.whole(answer.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if answer.reasoning:
            message |= {"content": text or None, "reasoning_content": answer.reasoning}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": reader.finish_reason(answer.finish_reason),
        }

    def beside_choices(self, answers: Mapping[int, Answer]) -> dict[str, Any]:
        """What a whole answer has once: all choices have the same prompt."""
        if self._num_prompt_logprobs is None:
            return {}
        tokens = answers[0].prompt_logprobs
        return {"prompt_logprobs": shown_prompt(tokens, self._num_prompt_logprobs)}

    def _logprobs(self, tokens: Iterable[TokenInfo] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {
            "content": [
                {
                    **_chat_token(token.data, token.logprob),
                    "top_logprobs": [_chat_token(top.data, top.logprob) for top in token.top],
                }
                for token in tokens
            ]
        }


class CompletionFormat:
    """``text_completion`` objects and chunks.

    Args:
        echoes: per prompt the text that comes before the answer; empty without ``echo``.
        num_logprobs: how many of the likeliest tokens each token of an echo has at most.
        num_prompt_logprobs: how many of them a choice of a whole answer shows at each place of its
            prompt; ``None`` shows nothing of it.
    """

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        echoes: tuple[str, ...] = (),
        *,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._echoes = echoes
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._num_characters: dict[int, int] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def deltas(self, delta: Delta, index: int, *, is_first: bool) -> list[dict[str, Any]]:
        """The ``choices`` entry of a delta's chunk."""
        text = (self._echo(delta.prompt_index) if is_first else "") + delta.text
        entry = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(delta, index),
            "finish_reason": delta.finish_reason,
        }
        return [entry]

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        """The ``choices`` entry of a whole answer."""
        found = {
            "index": index,
            "text": self._echo(answer.prompt_index) + answer.text,
            "logprobs": self._logprobs(answer, index),
            "finish_reason": answer.finish_reason,
        }
        if self._num_prompt_logprobs is not None:
            prompt = shown_prompt(answer.prompt_logprobs, self._num_prompt_logprobs)
            found["prompt_logprobs"] = prompt
        return found

    def beside_choices(self, answers: Mapping[int, Answer]) -> dict[str, Any]:
        """Each choice has its own prompt."""
        return {}

    def _echo(self, prompt_index: int) -> str:
        return self._echoes[prompt_index] if self._echoes else ""

    def _logprobs(self, part: Delta | Answer, index: int) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        echo = self._echo(part.prompt_index)
        prompt = part.prompt_logprobs if self._echoes else ()
        offsets = _offsets_in_echo(echo, prompt)
        decoder = self._decoders.setdefault(index, _new_decoder("replace"))
        for token in part.logprobs:
            offsets.append(self._num_characters.get(index, len(echo)))
            self._num_characters[index] = offsets[-1] + len(decoder.decode(token.data))
        tokens = [*prompt, *part.logprobs]
        return {
            "tokens": [_distinct_text(token.data) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                None if token.logprob is None else _by_text(token.top[: self._num_logprobs])
                for token in tokens
            ],
            "text_offset": offsets,
        }


ResponseFormat = ChatFormat | CompletionFormat


def _chat_token(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _offsets_in_echo(echo: str, tokens: Iterable[TokenInfo]) -> list[int]:
    """Where each token of a prompt begins in its text."""
    decoder = _new_decoder("replace")
    offsets, end = list[int](), 0
    for token in tokens:
        offsets.append(end)
        end += _length_in_echo(echo, end, decoder.decode(token.data))
    return offsets


def _length_in_echo(echo: str, start: int, token: str) -> int:
    """What tokenizers put before a text, a special token or a space, takes no place in it."""
    if echo.startswith(token, start) or start > 0:
        return len(token)
    begun = token.removeprefix(" ")
    return len(begun) if echo.startswith(begun) else 0


def _by_text(top: Iterable[Alternative]) -> dict[str, float]:
    """Of two tokens with the same text the likelier one stays."""
    found: dict[str, float] = {}
    for token in top:
        found.setdefault(_distinct_text(token.data), token.logprob)
    return found


def _distinct_text(data: bytes) -> str:
    """The text of a token; parts of characters as the OpenAI API writes them, so that two of them
    stay two keys."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Answer:
    """One choice as it is collected."""

    def __init__(self, prompt_index: int) -> None:
        self.prompt_index = prompt_index
        self.reasoning = ""
        self.text = ""
        self.logprobs: list[TokenInfo] | None = None
        self.prompt_logprobs: tuple[TokenInfo, ...] = ()
        self.finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.reasoning += delta.reasoning
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        self.prompt_logprobs += delta.prompt_logprobs
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs


class ResponseBuilder:
    """The objects of one response, which share an id and a time.

    Args:
        includes_usage: whether a stream ends with a chunk of usage, which is null in those before.
    """

    def __init__(
        self,
        form: ResponseFormat,
        model: str,
        request_id: str,
        num_choices: int,
        *,
        includes_usage: bool = False,
    ) -> None:
        self._form = form
        self._includes_usage = includes_usage
        self._num_choices = num_choices
        self._head = {
            "id": f"{form.prefix}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }
        self._answers: dict[int, Answer] = {}
        self._prompts: dict[int, tuple[TokenInfo, ...]] = {}

    def begin(self) -> list[dict[str, Any]]:
        """Nothing comes before the first delta."""
        return []

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of one delta: one, but two where a tool call begins and goes on."""
        index = self._index(delta)
        is_first = index not in self._answers
        if is_first:
            delta = self._with_prompt(delta)
            self._answers[index] = Answer(delta.prompt_index)
        choices = self._form.deltas(delta, index, is_first=is_first)
        choices[-1] |= _sources(delta)
        usage_later = {"usage": None} if self._includes_usage else {}
        return [
            {**self._head, "object": self._form.chunk_kind, "choices": [choice], **usage_later}
            for choice in choices
        ]

    def end(self, summary: Summary) -> list[dict[str, Any]]:
        """The chunk after the last delta, if asked for: no choices, but usage and what drafting
        did."""
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
        """The error, instead of what has not come."""
        return [error_body(error)]

    def collect(self, delta: Delta) -> None:
        """Add a delta to the whole answer."""
        index = self._index(delta)
        if index not in self._answers:
            delta = self._with_prompt(delta)
            self._answers[index] = Answer(delta.prompt_index)
        self._answers[index].add(delta)

    def whole(self, summary: Summary) -> dict[str, Any]:
        """The answer in one object."""
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
        """The first delta of a choice with the log probabilities of its prompt, which came once."""
        prompt = delta.prompt_logprobs or self._prompts.get(delta.prompt_index, ())
        self._prompts[delta.prompt_index] = prompt
        return delta._replace(prompt_logprobs=prompt)

    def _index(self, delta: Delta) -> int:
        return delta.prompt_index * self._num_choices + delta.choice_index

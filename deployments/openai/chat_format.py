"""Chats as the OpenAI API has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from deployments.generation import Delta, TokenInfo
from deployments.openai.answer import Answer
from deployments.openai.long_list import LongList
from deployments.openai.prompt_logprobs import shown_prompt
from deployments.openai.tool_reader import ToolReader
from deployments.parsers.tool_parser import MakeParser


class ChatFormat:
    """Makes ``chat.completion`` objects and chunks.

    Args:
        tool_parser: reads tool calls; ``None`` leaves the text as it is.
        is_one_call: whether calls after the first are dropped.
        is_named_call: whether the request named the function to call.
        num_prompt_logprobs: how many of the likeliest tokens a whole answer shows at each place of
            the prompt; ``None`` shows nothing of it.
        shows_token_ids: whether choices have the ids of their tokens, and answers those of the
            prompt.
    """

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        tool_parser: MakeParser | None = None,
        *,
        is_one_call: bool = False,
        is_named_call: bool = False,
        num_prompt_logprobs: int | None = None,
        shows_token_ids: bool = False,
    ) -> None:
        self._num_prompt_logprobs = num_prompt_logprobs
        self._shows_token_ids = shows_token_ids
        self._make_reader = partial(
            ToolReader, tool_parser, is_one_call=is_one_call, is_named=is_named_call
        )
        self._readers: dict[int, ToolReader] = {}
        self._begun: set[int] = set()
        """The choices that have text, a call or reasoning."""

    def opening(self, first: Mapping[str, Any], num_choices: int) -> list[dict[str, Any]]:
        """Return the ``choices`` entries of the chunks before all others: the role of each choice,
        in order and without anything else, since clients make a choice of its first chunk, and some
        then add what that has once more.

        The content is empty if the choice begins with text, and null if it begins with a call or
        with reasoning.  It is null also if nobody knows yet: a text may follow, whereas an empty
        one would be a part of the answer to some clients.

        Args:
            first: the entry of the chunk after these.
        """
        message = first["delta"]
        has_text = "content" in message and "reasoning_content" not in message
        return [
            self._entry(
                index,
                {
                    "role": "assistant",
                    "content": "" if has_text and index == first["index"] else None,
                },
            )
            for index in range(num_choices)
        ]

    def deltas(self, delta: Delta, index: int, *, is_first: bool) -> list[dict[str, Any]]:
        """Return the ``choices`` entries of the chunks of a delta: one for each call that begins,
        and for each piece of arguments, since a client takes a call for complete when the next
        begins."""
        if index not in self._readers:
            self._readers[index] = self._make_reader()
        reader = self._readers[index]
        text, calls = reader.read(delta.text, is_last=delta.finish_reason is not None)
        messages = [
            self._message(delta, index, text, calls[:1]),
            *({"tool_calls": [call]} for call in calls[1:]),
        ]
        entries = [self._entry(index, message) for message in messages]
        entries[-1] |= {
            "logprobs": _logprobs_now(delta.logprobs),
            "finish_reason": reader.finish_reason(delta.finish_reason),
        }
        if delta.finish_reason is not None:
            entries[-1]["stop_reason"] = delta.stop_reason
        if self._shows_token_ids:
            entries[-1]["token_ids"] = list(delta.token_ids)
        return entries

    def _message(
        self, delta: Delta, index: int, text: str, calls: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return what a delta adds to a message; where the answer ends without anything, its text
        is empty."""
        message: dict[str, Any] = {}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if text:
            message["content"] = text
        if calls:
            message["tool_calls"] = calls
        if message or delta.reasoning is not None:
            self._begun.add(index)
        elif delta.finish_reason is not None and index not in self._begun:
            message["content"] = ""
        return message

    def _entry(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        found = {"index": index, "delta": message, "logprobs": None, "finish_reason": None}
        return found | {"token_ids": []} if self._shows_token_ids else found

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        """Return the ``choices`` entry of a whole answer."""
        reader = self._make_reader()
        text, calls = reader.whole(answer.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if answer.reasoning is not None or calls:
            message["content"] = text or None
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = calls
        found = {
            "index": index,
            "message": message,
            "logprobs": _logprobs(answer.logprobs),
            "finish_reason": reader.finish_reason(answer.finish_reason),
            "stop_reason": answer.stop_reason,
        }
        if self._shows_token_ids:
            found["token_ids"] = answer.token_ids
        return found

    def beside_delta(self, delta: Delta) -> dict[str, Any]:
        """Return the fields beside the choices of the first chunk of a stream."""
        if not self._shows_token_ids:
            return {}
        return {"prompt_token_ids": list(delta.prompt_token_ids)}

    def beside_choices(self, answers: Mapping[int, Answer]) -> dict[str, Any]:
        """Return the fields of a whole answer beside its choices, which all have the same
        prompt."""
        found: dict[str, Any] = {}
        if self._num_prompt_logprobs is not None:
            tokens = answers[0].prompt_logprobs
            found["prompt_logprobs"] = shown_prompt(tokens, self._num_prompt_logprobs)
        if self._shows_token_ids:
            found["prompt_token_ids"] = list(answers[0].prompt_token_ids)
        return found


def _logprobs(tokens: Sequence[TokenInfo] | None) -> dict[str, Any] | None:
    return None if tokens is None else {"content": LongList(tokens, _with_others)}


def _logprobs_now(tokens: Sequence[TokenInfo] | None) -> dict[str, Any] | None:
    return None if tokens is None else {"content": [*map(_with_others, tokens)]}


def _with_others(token: TokenInfo) -> dict[str, Any]:
    return {
        **_chat_token(token.data, token.logprob),
        "top_logprobs": [_chat_token(top.data, top.logprob) for top in token.top],
    }


def _chat_token(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

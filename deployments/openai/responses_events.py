"""Answers of the OpenAI Responses API: the events of a response, and the response they make."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from deployments.events import Event
from deployments.generation import Delta, Summary
from deployments.openai.objects import error_body, metrics
from deployments.openai.responses_items import CallItem, Item, MessageItem, ReasoningItem
from deployments.openai.responses_logprobs import TextTokens
from deployments.openai.responses_protocol import ResponsesBody
from deployments.openai.responses_tools import OwnName
from deployments.parsers.answer_reader import AnswerReader, Call, Piece, Reasoning
from deployments.parsers.call_reader import Arguments
from deployments.parsers.tool_parser import MakeParser
from hdserve.errors import HdserveError, Overloaded, PromptTooLong, RequestError


def usage(summary: Summary) -> dict[str, Any]:
    """Return the ``usage`` object."""
    num_input, num_reused = summary.num_prompt_tokens, summary.num_reused_tokens
    return {
        "input_tokens": num_input,
        "input_tokens_details": {
            "cached_tokens": num_reused,
            "cache_write_tokens": num_input - num_reused,
        },
        "output_tokens": summary.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": summary.num_reasoning_tokens or 0},
        "total_tokens": num_input + summary.num_output_tokens,
    }


class ResponseEvents:
    """Builds one response, item after item.

    At most one item is open, the last; reasoning, text and calls come in the order in which the
    model wrote them::

        created  in_progress │ item added  deltas ...  item done │ item added ... │ completed

    Args:
        tool_parser: reads tool calls; ``None`` leaves the text as it is.
    """

    def __init__(
        self, body: ResponsesBody, request_id: str, tool_parser: MakeParser | None
    ) -> None:
        self._head = _head(body, request_id)
        self._own_names = body.own_names
        self._tokens = TextTokens()
        self._reader = AnswerReader(
            tool_parser,
            is_one_call=body.parallel_tool_calls is False,
            is_joined=False,
            on_dropped=self._tokens.pass_over,
        )
        self._items: list[dict[str, Any]] = []
        self._open: Item | None = None
        self._finish_reason: str | None = None
        self._num_events = 0
        self._num_logprobs = 0

    @property
    def size(self) -> int:
        """How many log probabilities came."""
        return self._num_logprobs

    def add(self, delta: Delta) -> list[Event]:
        """Return the events of a delta; before the first one those that begin the response."""
        if not self._num_events:  # now it is known what is sampled with
            self._head |= {"temperature": delta.temperature, "top_p": delta.top_p}
        begun = self._begin_response()
        self._finish_reason = delta.finish_reason or self._finish_reason
        is_last = delta.finish_reason is not None
        self._num_logprobs += sum(1 + len(token.top) for token in delta.logprobs or ())
        self._tokens.add(delta.logprobs or ())
        pieces = self._reader.read(delta.text, reasoning=delta.reasoning, is_last=is_last)
        events = [event for piece in pieces for event in self._read(piece)]
        return begun + [self._numbered(event) for event in events]

    def _begin_response(self) -> list[Event]:
        """Return the events before all others, if they have not come."""
        if self._num_events:
            return []
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._numbered({"type": kind, "response": response}) for kind in kinds]

    def end(self, summary: Summary) -> list[Event]:
        """Return the events after the last delta; the last one has the whole response."""
        events: list[Event] = []
        if not self._items and self._open is None:
            events += self._begin(MessageItem(self._tokens))
        is_cut_off = self._finish_reason == "length" or isinstance(self._open, CallItem)
        events += self._close("incomplete" if is_cut_off else "completed")
        response = self._ended(summary)
        events.append({"type": f"response.{response['status']}", "response": response})
        return [self._numbered(event) for event in events]

    def _ended(self, summary: Summary) -> dict[str, Any]:
        """Return the response, once it has ended."""
        is_cut_off = self._finish_reason == "length"
        return {
            **self._response("incomplete" if is_cut_off else "completed"),
            "completed_at": None if is_cut_off else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
            "usage": usage(summary),
            "metrics": metrics(summary),
        }

    def fail(self, error: HdserveError) -> list[Event]:
        """Return the last events, instead of what has not come: the error, and the response that
        failed.  Some clients know the one, and some the other.  Where nothing has come, those that
        begin the response are before them, as clients want.

        The error has its fields as this API has them, and again as the object ``error`` of an
        answer, by which libraries find one in a stream.
        """
        told = error_body(error)["error"]
        fields = {name: told[name] for name in ("code", "message", "param")}
        reason = {"code": _failure_code(error), "message": error.message}
        begun = self._begin_response()
        events = [
            {"type": "error", **fields, "error": told},
            {
                "type": "response.failed",
                "response": {
                    **self._response("failed"),
                    "output": [*map(_without_logprobs, self._items)],
                    "error": reason,
                },
            },
        ]
        return begun + [self._numbered(event) for event in events]

    def collect(self, delta: Delta) -> None:
        """Add a delta to the whole response."""
        self.add(delta)

    def whole(self, summary: Summary) -> dict[str, Any]:
        """Return the response, which its last event has."""
        response: dict[str, Any] = self.end(summary)[-1]["response"]
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {**self._head, "status": status, "output": [*self._items]}

    def _read(self, piece: Piece) -> Iterator[Event]:
        if not isinstance(piece, str):
            self._tokens.pass_over("" if isinstance(piece, Call) else piece.text)
        if isinstance(piece, Call):
            name = self._own_names.get(piece.name, OwnName(None, piece.name))
            yield from self._begin(CallItem(name, piece.call_id))
        elif isinstance(piece, Arguments):
            yield from self._add(piece.text)
            yield from self._close("completed") if piece.is_last else ()
        elif isinstance(piece, Reasoning):
            if not isinstance(self._open, ReasoningItem):
                yield from self._begin(ReasoningItem())
            yield from self._add(piece.text)
        else:
            if not isinstance(self._open, MessageItem):
                yield from self._begin(MessageItem(self._tokens))
            yield from self._add(piece)

    def _begin(self, item: Item) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = item
        yield self._placed({"type": "response.output_item.added", "item": item.item("in_progress")})
        yield from map(self._placed, item.begin())

    def _add(self, text: str) -> Iterator[Event]:
        if self._open is not None and text:
            yield self._placed(self._open.add(text))

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        yield from map(self._placed, self._open.end())
        item = self._open.item(status)
        yield self._placed({"type": "response.output_item.done", "item": item})
        self._items.append(item)
        self._open = None

    def _placed(self, event: Event) -> Event:
        return {**event, "output_index": len(self._items)}

    def _numbered(self, event: Event) -> Event:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of a response that failed, which is written at once, however long it is."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _failure_code(error: HdserveError) -> str:
    """Return the one of the few codes that this API has for failed responses."""
    if isinstance(error, PromptTooLong):  # which clients know, though it is not documented
        return error.code
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"


def _head(body: ResponsesBody, request_id: str) -> dict[str, Any]:
    """Return what a response says of its request."""
    choice = body.tool_choice
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
        "tools": body.shown_tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }

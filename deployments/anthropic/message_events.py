"""Answers of the Messages API: the events of a message, and the message they make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from deployments.anthropic.blocks import Block, TextOrThinking, ToolUse
from deployments.anthropic.objects import error_body, token_counts, usage
from deployments.anthropic.protocol import MessagesBody
from deployments.events import Event
from deployments.generation import Delta, Summary
from deployments.openai.objects import metrics
from deployments.parsers.answer_reader import AnswerReader, Call, Piece, Reasoning
from deployments.parsers.call_reader import Arguments
from deployments.parsers.tool_parser import MakeParser
from hdserve.errors import HdserveError


class MessageEvents:
    """Builds one message, block after block.

    At most one block is open, the last; thoughts, text and calls come in the order in which the
    model wrote them::

        message_start │ block start  deltas ...  block stop │ block start ... │ delta  message_stop

    Args:
        tool_parser: reads tool calls; ``None`` leaves the text as it is.
    """

    size = 0
    """Of token ids and log probabilities, as an :class:`AnswerBuilder` has them: all is text."""

    def __init__(self, body: MessagesBody, request_id: str, tool_parser: MakeParser | None) -> None:
        self._body = body
        self._request_id = request_id
        self._reader = AnswerReader(tool_parser, is_one_call=body.is_one_call, is_joined=False)
        self._blocks: list[dict[str, Any]] = []
        self._open: Block | None = None
        self._has_called = False
        self._last: Delta | None = None
        self._num_tokens = 0

    def add(self, delta: Delta) -> list[Event]:
        """Return the events of a delta; before the first one that which begins the message."""
        events = [] if self._last else [self._begin_message(delta)]
        self._last = delta
        self._num_tokens += len(delta.token_ids)
        is_last = delta.finish_reason is not None
        for piece in self._reader.read(delta.text, reasoning=delta.reasoning, is_last=is_last):
            events += self._read(piece)
        return events

    def end(self, summary: Summary) -> list[Event]:
        """Return the events after the last delta."""
        has_called = self._has_called and not isinstance(self._open, ToolUse)
        events = [*self._close()]
        counts = {"usage": usage(summary), "metrics": metrics(summary)}
        ended = {"type": "message_delta", "delta": self._ended(has_called=has_called), **counts}
        return [*events, ended, {"type": "message_stop"}]

    def fail(self, error: HdserveError) -> list[Event]:
        """Return the last event, instead of what has not come."""
        return [error_body(error, self._request_id)]

    def collect(self, delta: Delta) -> None:
        """Add a delta to the whole message."""
        self.add(delta)

    def whole(self, summary: Summary) -> dict[str, Any]:
        """Return the message, which its events make."""
        ended, _ = self.end(summary)[-2:]
        counts = {"usage": ended["usage"], "metrics": ended["metrics"]}
        return {**self._message(), **ended["delta"], **counts}

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [*self._blocks],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _begin_message(self, first: Delta) -> Event:
        counts = token_counts(first.num_prompt_tokens, first.num_reused_tokens, 0)
        return {"type": "message_start", "message": {**self._message(), "usage": counts}}

    def _ended(self, *, has_called: bool) -> dict[str, Any]:
        """Return why the message ended."""
        assert self._last is not None, "a choice ends with a delta"
        reason, sequence = "end_turn", None
        if self._last.finish_reason == "length":
            is_asked = self._num_tokens >= self._body.max_tokens
            reason = "max_tokens" if is_asked else "model_context_window_exceeded"
        elif isinstance(self._last.stop_reason, str):
            reason, sequence = "stop_sequence", self._last.stop_reason
        elif has_called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _read(self, piece: Piece) -> Iterator[Event]:
        if isinstance(piece, Call):
            self._has_called = True
            yield from self._begin(ToolUse(piece.name, piece.call_id))
        elif isinstance(piece, Arguments):
            yield from self._add(piece.text)
            yield from self._close() if piece.is_last else ()
        elif isinstance(piece, Reasoning):
            yield from self._say("thinking", piece.text)
        else:
            yield from self._say("text", piece)

    def _say(self, kind: Literal["text", "thinking"], text: str) -> Iterator[Event]:
        if not isinstance(self._open, TextOrThinking) or self._open.kind != kind:
            yield from self._begin(TextOrThinking(kind))
        yield from self._add(text)

    def _begin(self, block: Block) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        yield self._placed({"type": "content_block_start", "content_block": block.begun()})

    def _add(self, text: str) -> Iterator[Event]:
        if self._open is not None and text:
            yield self._placed({"type": "content_block_delta", "delta": self._open.add(text)})

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if isinstance(self._open, TextOrThinking) and (last := self._open.end()):
            yield self._placed({"type": "content_block_delta", "delta": last})
        yield self._placed({"type": "content_block_stop"})
        self._blocks.append(self._open.whole())
        self._open = None

    def _placed(self, event: Event) -> Event:
        return {**event, "index": len(self._blocks)}

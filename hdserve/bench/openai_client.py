"""Streams answers from any server of the OpenAI API, and records the times."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from types import SimpleNamespace, TracebackType
from typing import Any, Literal, Self

import aiohttp

from hdserve.bench.request_record import Outcome, RequestRecord
from hdserve.prompts import Messages

Api = Literal["chat", "completions"]

_PATHS: Mapping[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_END = b"[DONE]"
_MAX_ERROR_CHARACTERS = 300
_ODD_ANSWERS = (ValueError, LookupError, TypeError, AttributeError)
"""The errors of reading JSON that has an unexpected shape."""


class OpenAIClient:
    """Asks for one streamed answer per call; use as a context manager.

    Args:
        base_url: of the server, with or without ``/v1``.
        api: which route to call.
        body: sent with every request in addition to the prompt; includes the model.
        timeout_s: most seconds a request may take.
    """

    def __init__(
        self,
        base_url: str,
        api: Api,
        body: Mapping[str, Any],
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._api: Api = api
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = self._new_session(self._timeout_s)
        return self

    def _new_session(self, timeout_s: float) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_kept_connection)
        return aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            trace_configs=[trace],
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._open.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use the client in an async with"
        return self._session

    async def get_text(self, path: str, timeout_s: float | None = None) -> str | None:
        """Return the body of ``path``; ``None`` if the server does not offer it.

        Args:
            timeout_s: most seconds it may take; default: as for a request.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        try:
            async with self._open.get(self._base_url + path, timeout=timeout) as response:
                return await _text_of(response) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def fault(self, path: str) -> str:
        """Return why ``path`` cannot be read: what the server answers, or that it does not answer;
        empty if it can."""
        try:
            async with self._open.get(self._base_url + path) as response:
                is_read = response.status == 200
                return "" if is_read else _refusal(response.status, await _text_of(response))
        except (aiohttp.ClientError, TimeoutError) as error:
            return _named(error)

    async def first_model(self) -> str | None:
        """Return the first of ``/v1/models``; ``None`` if the server does not say."""
        return next(iter(await self._models()), None)

    async def names_of(self, model: str) -> set[str]:
        """Return ``model`` and, if ``/v1/models`` says that it stands for another, that name."""
        return {model, (await self._models()).get(model) or model}

    async def _models(self) -> dict[str, str | None]:
        """Return the names in ``/v1/models``, each with its ``root`` if the server says one; empty
        if it cannot be read."""
        text = await self.get_text("/v1/models")
        try:
            found = [] if text is None else json.loads(text)["data"]
            return {str(entry["id"]): entry.get("root") for entry in found}
        except _ODD_ANSWERS:
            return {}

    async def ask(self, name: str, prompt: str | Messages, **fields: Any) -> RequestRecord:
        """Send a text, as a user's message or as a prompt, or a conversation (only with the chat
        API), and read the answer to its end.

        Any failure is in the record; only cancellation is raised.

        Args:
            fields: added to the body, for this request only.
        """
        asked: dict[str, Any] = {"prompt": prompt}
        if self._api == "chat":
            is_text = isinstance(prompt, str)
            asked = {"messages": [{"role": "user", "content": prompt}] if is_text else prompt}
        record = RequestRecord(name, time.monotonic())
        try:
            await self._send({**self._body, **asked, **fields}, record)
        except (aiohttp.ClientError, TimeoutError, *_ODD_ANSWERS) as error:
            record.outcome = Outcome.FAILED
            record.error = _named(error)
        record.ended_s = time.monotonic()
        return record

    async def _send(self, body: dict[str, Any], record: RequestRecord) -> None:
        """Stream an answer; over a new connection if a kept one turns out to be closed."""
        try:
            await self._stream(self._open, body, record)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            if record.status is not None or not record.is_connection_kept:
                raise
            record.is_sent_again = True
            left_s = max(0.001, self._timeout_s - (time.monotonic() - record.started_s))
            async with self._new_session(left_s) as session:
                await self._stream(session, body, record)

    async def _stream(
        self, session: aiohttp.ClientSession, body: dict[str, Any], record: RequestRecord
    ) -> None:
        url = self._base_url + _PATHS[self._api]
        async with session.post(url, json=body, trace_request_ctx=record) as response:
            record.status = response.status
            if response.status != 200:
                await _note_refusal(response, record)
                return
            is_ended = False
            async for data, arrived_s in _events(response.content):
                if data == _END:
                    is_ended = True
                    break
                _note_chunk(json.loads(data), arrived_s, record)
            if is_ended:
                await _read_rest(response)
        if record.error:
            record.outcome = Outcome.FAILED
        elif is_ended and record.finish_reason is not None:
            record.outcome = Outcome.COMPLETED
        else:
            record.outcome = Outcome.FAILED
            record.error = "the stream was cut off"
        if not record.has_usage:
            record.num_output_tokens = len(record.chunk_times_s)


async def _read_rest(response: aiohttp.ClientResponse) -> None:
    """Read what comes after the answer: with that unread, the connection would be closed."""
    with suppress(aiohttp.ClientError, TimeoutError):
        await response.content.read()


async def _note_kept_connection(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _parameters: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    if context.trace_request_ctx is not None:  # set for requests that are recorded
        context.trace_request_ctx.is_connection_kept = True


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[bytes, float]]:
    """Yield the data of the server-sent events with the time of their arrival."""
    rest = b""
    async for data in content.iter_any():
        arrived_s = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip(), arrived_s


def _note_chunk(chunk: dict[str, Any], arrived_s: float, record: RequestRecord) -> None:
    if chunk.get("error"):
        record.error = str(chunk["error"])[:_MAX_ERROR_CHARACTERS]
        return
    if chunk.get("usage"):
        record.has_usage = True
        record.num_prompt_tokens = chunk["usage"]["prompt_tokens"]
        record.num_output_tokens = chunk["usage"]["completion_tokens"]
    metrics = chunk.get("metrics") or {}
    record.engine_ttft_s = metrics.get("time_to_first_token_s", record.engine_ttft_s)
    for choice in chunk.get("choices") or ():
        text = _text(choice)
        if text:
            record.chunk_times_s.append(arrived_s)
            record.text += text
        record.finish_reason = choice.get("finish_reason") or record.finish_reason


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    called = delta.get("tool_calls") or ()
    arguments = "".join(call["function"].get("arguments") or "" for call in called)
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return reasoning + (delta.get("content") or "") + arguments


async def _note_refusal(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    is_full = response.status == 429
    record.outcome = Outcome.REJECTED if is_full else Outcome.FAILED
    record.error = _refusal(response.status, await _text_of(response))
    wait_s = response.headers.get("retry-after", "")
    record.retry_after_s = float(wait_s) if wait_s.isdigit() else 0.0


async def _text_of(response: aiohttp.ClientResponse) -> str:
    """Bytes that are not text in its encoding are replaced."""
    return await response.text(errors="replace")


def _refusal(status: int, text: str) -> str:
    return f"{status}: {text}"[:_MAX_ERROR_CHARACTERS]


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]

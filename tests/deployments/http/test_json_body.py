"""Bodies of requests become data or errors."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any
from weakref import WeakSet

import pytest
from starlette.requests import Request

from deployments.http import json_body
from deployments.http.json_body import off_loop_by_body, read_json
from deployments.off_loop import MAX_SHARED_SIZE, OffLoop
from hdserve.errors import InvalidRequest, Unsupported


def request_of(body: bytes, encoding: str | None = None, upgrade: bytes = b"") -> Request:
    headers = [] if encoding is None else [(b"content-encoding", encoding.encode("latin-1"))]
    headers += [(b"upgrade", upgrade)] if upgrade else []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


def read(body: bytes) -> Any:
    """What a request with this body is read as."""
    return asyncio.run(read_json(request_of(body), OffLoop()))


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b'{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ('{"a": "é🙂"}'.encode(), {"a": "é🙂"}),
        (rb'{"a": "\ud83d\ude42"}', {"a": "🙂"}),
        (rb'{"a": "\\udead"}', {"a": r"\udead"}),
        (b'\xef\xbb\xbf{"a": -1.5e300}', {"a": -1.5e300}),
    ],
)
def test_json_is_read(body: bytes, data: Any) -> None:
    """Text in UTF-8, and in escapes that make pairs, is text."""
    assert read(body) == data


def test_escapes_do_not_have_all_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write a million numbers holds up the interpreter for a second."""
    monkeypatch.setattr("json.dumps", None)
    data = read(rb'{"\ud83d\ude42": [1, {"a": ["\ud83d\ude42"]}]}')
    assert data == {"🙂": [1, {"a": ["🙂"]}]}


@pytest.mark.parametrize(("size", "is_same"), [(2**16, True), (2**16 + 1, False)])
def test_work_on_long_bodies_is_done_in_a_thread(size: int, is_same: bool) -> None:
    request = request_of(b" " * size)
    found = asyncio.run(off_loop_by_body(request, OffLoop(), threading.get_ident))
    assert (found == threading.get_ident()) is is_same


@pytest.mark.parametrize("encoding", ["gzip", "deflate, gzip", "é" * 1000])
def test_compressed_bodies_are_refused_as_such(encoding: str) -> None:
    """Not as broken JSON; a body that is sent as it is may say so."""
    with pytest.raises(Unsupported, match="is not supported") as caught:
        asyncio.run(read_json(request_of(b"{}", encoding), OffLoop()))
    assert caught.value.param == "content-encoding"
    assert len(caught.value.message) < 100
    assert asyncio.run(read_json(request_of(b"{}", "Identity"), OffLoop())) == {}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": }',
        b"\xff\xfe",
        '{"a": 1}'.encode("utf-16"),
        '{"a": "\\ud800"}'.encode("utf-16"),
        b'{"a": "\xed\xa0\x80"}',
        b'"' + rb"\"" * 10**6,
        b"[" * 40_000,
        b'{"seed": ' + b"1" * 5000 + b"}",
        rb'{"a": "\ud83d"}',
        rb'{"\uDE42": 1}',
    ],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    """Broken, too deep, not in UTF-8, with endless numbers or with half characters: one error,
    status 400."""
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        read(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "it is empty"),
        (b"'{\"a\": 1}'", "Expecting value, line 1, column 1"),
        (b'{"a": 1,\n "b": }', "Expecting value, line 2, column 7"),
        (b'{"a": "b\nc"}', "Invalid control character at, line 1, column 9"),
        ('{"a": "é"}'.encode("latin-1"), "it is not in UTF-8"),
        (rb'{"a": "\ud83d"}', "it has half of a surrogate pair"),
        (b"1" * 5000, "a number has too many digits"),
    ],
)
def test_where_a_body_is_no_json_is_said(body: bytes, reason: str) -> None:
    """Shells take quotes away, and files have other encodings."""
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.message == f"the request body is not valid JSON: {reason}"


def test_a_body_that_an_upgrade_took_away_is_missed_as_such() -> None:
    """Java's HTTP client asks for HTTP/2 with every request, and the body behind that is lost in
    the HTTP server."""
    with pytest.raises(InvalidRequest, match=r"upgrade 'h2c'.*HTTP/1\.1") as caught:
        asyncio.run(read_json(request_of(b"", upgrade=b"h2c"), OffLoop()))
    assert caught.value.param == "upgrade"
    assert asyncio.run(read_json(request_of(b"{}", upgrade=b"h2c"), OffLoop())) == {}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_no_answer_could_repeat_are_refused(number: str) -> None:
    """They are no JSON, or none that can be written."""
    with pytest.raises(InvalidRequest, match="not finite"):
        read(f'{{"metadata": [{number}]}}'.encode())


def test_the_longest_bodies_are_read_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they would leave the event loop no turn."""
    reading: list[bytes] = []
    counts: list[int] = []

    def noted(body: bytes) -> None:
        reading.append(body)
        time.sleep(0.02)
        counts.append(len(reading))
        reading.pop()

    async def test() -> None:
        off_loop, bodies = OffLoop(), [b" " * (MAX_SHARED_SIZE + 1)] * 4
        await asyncio.gather(*(read_json(request_of(body), off_loop) for body in bodies))

    monkeypatch.setattr(json_body, "parse_json", noted)
    asyncio.run(test())
    assert counts == [1] * 4


def test_many_objects_are_refused() -> None:
    """They take seconds to read; as many brackets in a text do not, nor do token ids."""
    assert read(b'["' + b"{[:" * 100_000 + b'"]') is not None
    assert len(read(b"[" + b"1," * 300_000 + b"1]")) == 300_001
    members = ",".join(f'"{number}": 1' for number in range(50_000))
    for body in (b"[" + b"[]," * 50_000 + b"1]", f"{{{members}}}".encode()):
        with pytest.raises(InvalidRequest, match="50000 objects, arrays and members"):
            read(body)


def test_many_texts_in_arrays_are_refused() -> None:
    """Each may become an object of hundreds of bytes; what is in texts, names, values of members
    and token ids do not count, and a list of words that a schema may have is read."""
    for text in (b'""', rb'"\""', rb'"\\"'):
        for body in (
            b"[" + (text + b", ") * 100_000 + text + b"]",
            b'{"a": [' + (text + b",") * 10**6,
        ):
            with pytest.raises(InvalidRequest, match="100000 texts in arrays"):
                read(body)
        assert len(read(b"[" + (text + b", ") * 99_999 + text + b"]")) == 100_000
    assert read(b'["' + rb"\"," * 10**6 + b'"]') == ['",' * 10**6]
    members = ",".join(f'"{number}": "a"' for number in range(49_000))
    assert len(read(f"{{{members}}}".encode())) == 49_000
    prompt = b",".join([b"128000"] * 600_000)
    assert len(read(b'{"prompt": [' + prompt + b"]}")["prompt"]) == 600_000


def test_one_value_of_the_longest_bodies_is_there_at_a_time() -> None:
    """All would be read before anything is made of the first one, and take memory meanwhile."""

    class Value:
        pass

    counts, values = [], WeakSet[Value]()

    def make(_data: object) -> None:
        counts.append(len(values))

    def parse(_body: bytes) -> Value:
        value = Value()
        values.add(value)
        return value

    async def test() -> None:
        off_loop, body = OffLoop(), b" " * (MAX_SHARED_SIZE + 1)
        await asyncio.gather(*(read_json(request_of(body), off_loop, make) for _ in range(4)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "parse_json", parse)
        asyncio.run(test())
    assert counts == [1] * 4


def test_a_long_body_is_read_beside_others() -> None:
    """The event loop goes on meanwhile."""

    async def others() -> None:
        while True:
            num_turns.append(1)
            await asyncio.sleep(0)

    async def test() -> None:
        task = asyncio.create_task(others())
        assert await read_json(request_of(b'"' + b"a" * 2**17 + b'"'), OffLoop()) == "a" * 2**17
        task.cancel()

    num_turns: list[int] = []
    asyncio.run(test())
    assert num_turns


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a\\"[": ', b"}")])
def test_deep_bodies_are_refused(opening: bytes, closing: bytes) -> None:
    """Nesting that would break what reads a request later on is refused; brackets in texts and
    many of them side by side are no nesting."""
    assert read(opening * 100 + b"1" + closing * 100) is not None
    assert len(read(b"[" + b"[[]]," * 5000 + b'"' + b"[" * 500 + b'"]')) == 5001
    with pytest.raises(InvalidRequest, match="100 deep"):
        read(opening * 101 + b"1" + closing * 101)

"""JSON as clients send it: strict, and bounded in what reading it costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from hdserve.errors import InvalidRequest

_MAX_DEPTH = 100
MAX_PARTS = 50_000
"""The most objects, arrays and members of objects in a body.  To read a body of nothing else takes
seconds, in which the interpreter does nothing beside it; to read texts and token ids does not."""

MAX_TEXTS = 100_000
"""The most texts in arrays of a body, as many as a schema may have: each takes hundreds of bytes
once it is read as a part of a message, and three where it is sent."""

_PIECE_BYTES = 2**16
"""Texts are taken out of so much at a time, in a millisecond or two, as no other thread of the
interpreter goes on meanwhile."""

_NO_MARKS = bytes(set(range(256)) - set(b"[]{}:"))
_STEPS = {ord("["): 1, ord("{"): 1, ord(":"): 0, ord("]"): -1, ord("}"): -1}


def parse_json(body: bytes) -> Any:
    """Return the value that ``body`` spells.

    Raises:
        InvalidRequest: it is no JSON in UTF-8, has too many objects, arrays, members and texts
            or nests them too deeply, or has a number or text that cannot be processed.
    """
    marks, num_quotes = _marks(body)
    if _num_marks(marks) > MAX_PARTS:
        reason = f"the request body has more than {MAX_PARTS} objects, arrays and members of them"
        raise InvalidRequest(reason)
    # A member has a colon, and two texts at most.
    if num_quotes // 2 - 2 * marks.count(b":") > MAX_TEXTS:
        raise InvalidRequest(f"the request body has more than {MAX_TEXTS} texts in arrays")
    try:
        text = body.decode("utf-8-sig")
        data = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if b"\\ud" in body.lower():  # perhaps half of a surrogate pair, which is no text
            _check_texts(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {_fault(error)}") from error
    if max(accumulate(map(_STEPS.__getitem__, marks)), default=0) > _MAX_DEPTH:
        raise InvalidRequest(f"the request body is nested more than {_MAX_DEPTH} deep")
    return data


def _check_texts(data: Any) -> None:
    """
    Raises:
        UnicodeEncodeError: a text has half of a surrogate pair.
    """
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, dict):
            waiting += value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def num_parts(body: bytes) -> int:
    """Return the number of objects, arrays and members of objects; 0 where there are few."""
    marks, _ = _marks(body)
    return _num_marks(marks)


def _fault(error: ValueError | RecursionError) -> str:
    """Say what is wrong with a text that is no JSON, and where."""
    if isinstance(error, json.JSONDecodeError):
        place = f"line {error.lineno}, column {error.colno}"
        return f"{error.msg}, {place}" if error.doc else "it is empty"
    if isinstance(error, UnicodeDecodeError):
        return "it is not in UTF-8"
    if isinstance(error, UnicodeEncodeError):
        return "it has half of a surrogate pair"
    is_deep = isinstance(error, RecursionError)
    return "it is nested too deep" if is_deep else "a number has too many digits"


def _marks(body: bytes) -> tuple[bytes, int]:
    """Return the brackets and colons outside of texts, and the number of quotes around texts; none
    where there are too few for any limit."""
    if _num_marks(body) <= _MAX_DEPTH and body.count(b'"') <= 2 * MAX_TEXTS:
        return b"", 0
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return b"".join(_marks_of_pieces(bare)), bare.count(b'"')


def _marks_of_pieces(body: bytes) -> Iterator[bytes]:
    """Yield the brackets and colons outside of texts, by pieces of a body without escaped quotes
    and backslashes.  In a text that is no JSON escapes may be outside of texts, too, and what
    follows them is not read."""
    is_in_text = False
    for start in range(0, len(body), _PIECE_BYTES):
        parts = body[start : start + _PIECE_BYTES].split(b'"')
        yield b"".join(parts[is_in_text::2]).translate(None, _NO_MARKS)
        is_in_text ^= len(parts) % 2 == 0


def _num_marks(marks: bytes) -> int:
    return marks.count(b"[") + marks.count(b"{") + marks.count(b":")


def _finite(number: str) -> float:
    """Read a finite number; JSON has neither ``NaN`` nor ``Infinity``."""
    value = float(number)
    if not math.isfinite(value):
        raise InvalidRequest(f"the request body has a number that is not finite: {number[:20]}")
    return value

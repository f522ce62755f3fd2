"""Reading tool calls as they arrive: the name first, then the arguments piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_SEPARATORS = ",; \n\r\t"
_ARGUMENTS_KEYS = ("arguments", "parameters")
"""Models write either, whatever their template says."""

_MAX_BRACES = 2
"""How many a head has at most, with that behind it."""

_HEAD = r'{\s*"name"\s*:\s*"([\w.-]{1,128})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?={)'


class CallBegin(NamedTuple):
    """The beginning of a call; the following arguments belong to it."""

    name: str


class Arguments(NamedTuple):
    """A piece of the arguments, a JSON text, of the last call that began.

    Attributes:
        is_last: whether they are now complete.
    """

    text: str
    is_last: bool


CallPart = CallBegin | Arguments


class CallReader:
    """Reads calls that are JSON objects, one after the other.

    A call with its name before its arguments, as chat templates write it, is passed on as it
    arrives, with its arguments as the model wrote them::

        {"name": "f", "arguments": {"a": 1}}; {"name": "g", "arguments": {...
        |------- buffered ---------|passed-|------- buffered ---------|passed

    From the opening brace of its arguments on it is a call, whatever follows.  Anything else is
    buffered to the end, and consists of calls only if all of it does.  The buffer is only read
    again when a head may be complete, and no more once it is known to begin with none: a model may
    write white space without end, or anything else.

    Args:
        closing: what ends the calls, outside of strings; by default nothing does.
        separators: the characters that may be before, between and after calls.
        head: a regular expression for what comes before the arguments and their brace, itself with
            one brace at most; its one group is the name.
        ending: what may be left over after the last call.
        is_enclosed: whether a call is an object that contains the arguments; else it ends with
            them, or with ``closing``.

    Attributes:
        closing: as given.
        kept: the buffer; after the end, what is not a call.
        rest: what came after ``closing``.
    """

    def __init__(
        self,
        closing: str = "",
        separators: str = _SEPARATORS,
        head: str = _HEAD,
        *,
        ending: str = "",
        is_enclosed: bool = True,
    ) -> None:
        self.closing = closing
        self._ending = ending
        self._is_enclosed = is_enclosed
        self._separators = separators
        self._head = re.compile(f"[{re.escape(separators)}]*+{head}")
        self._is_none = False
        self._new = ""
        self._call: _OpenCall | None = None
        self.num_calls = 0
        self.is_closed = False
        self.kept = ""
        self.rest = ""

    def push(self, text: str) -> list[CallPart]:
        """Return what is certain with ``text``, the next piece; nothing may follow ``closing``."""
        self.kept += text
        self._new = text
        return list(self._take())

    def end(self) -> list[CallPart]:
        """Return the calls in the buffer; nothing more will arrive."""
        left = self.kept.strip(self._separators)
        is_mark = self._ending.startswith(left) or self.closing.startswith(left)
        if self._call is not None or (self.num_calls and is_mark):
            self.kept = ""  # at most the beginning of a mark
            return []
        calls = _whole_calls(left, self._separators)
        if calls:
            self.kept = ""
            self.num_calls += len(calls) // 2
        return calls

    def _take(self) -> Iterator[CallPart]:
        while not self.is_closed:
            if self._call is not None:
                yield from self._read_on(self._call)
                if self._call is not None:
                    return
            elif head := self._begun():
                self._call = _OpenCall(self.closing, is_enclosed=self._is_enclosed)
                self.kept = self.kept[head.end() :]
                self.num_calls += 1
                yield CallBegin(head[1])
            else:
                self._close()
                return

    def _begun(self) -> re.Match[str] | None:
        """Return the head that the buffer begins with, if it may have become complete."""
        if self._is_none or "{" not in self._new:
            return None
        head = self._head.match(self.kept)
        self._is_none = head is None and self.kept.count("{") >= _MAX_BRACES
        return head

    def _read_on(self, call: _OpenCall) -> Iterator[CallPart]:
        piece, num_read = call.read(self.kept)
        self.kept = self.kept[num_read:]
        if piece:
            yield Arguments(piece, call.has_arguments)
        if not call.is_over and self.kept.startswith(self.closing or "\0"):
            self._close()
        if call.is_over or self.is_closed:
            self._call = None

    def _close(self) -> None:
        """Stop at ``closing`` if it has arrived, which ends in the last piece."""
        start = len(self.kept) - len(self._new) - len(self.closing) + 1
        place = self.kept.find(self.closing, max(0, start)) if self.closing else -1
        if place >= 0:
            self.is_closed = True
            self.rest = self.kept[place + len(self.closing) :]
            self.kept = self.kept[:place]


class _OpenCall:
    """A call from its arguments on: finds where they end, and where its object ends.

    Attributes:
        has_arguments: whether the arguments are complete.
    """

    def __init__(self, closing: str, *, is_enclosed: bool) -> None:
        self._closing = closing
        self._is_enclosed = is_enclosed
        self._depth = 1
        self._is_string = False
        self._is_torn = False
        self._is_escaped = False
        self.has_arguments = False

    @property
    def is_over(self) -> bool:
        """Whether nothing that follows belongs to the call."""
        return self._depth < 1 or (self.has_arguments and not self._is_enclosed)

    def read(self, text: str) -> tuple[str, int]:
        """Return the arguments that ``text`` begins with, and how many of its characters belong to
        the call: nothing after it, and nothing that is ``closing`` or may become it."""
        num_arguments = 0
        for index, char in enumerate(text):
            if self.is_over or self._may_close(text, index):
                return text[:num_arguments], index
            self._step(char)
            if not self.has_arguments:
                num_arguments = index + 1
                self.has_arguments = self._depth < 2
        return text[:num_arguments], len(text)

    def _may_close(self, text: str, index: int) -> bool:
        """Whether ``text`` may have ``closing`` at ``index``.

        JSON strings have no line breaks: after one, a string is invalid, so there is no reason to
        read on beyond ``closing``.
        """
        closing = self._closing
        if not closing or (self._is_string and not self._is_torn):
            return False
        return closing.startswith(text[index : index + len(closing)])

    def _step(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_string:
            self._is_escaped = char == "\\"
            self._is_string = char != '"'
            self._is_torn |= char == "\n"
        elif char == '"':
            self._is_string, self._is_torn = True, False
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1


def _whole_calls(text: str, separators: str) -> list[CallPart]:
    """Return the calls that ``text`` consists of; none if it contains anything else."""
    decoder = json.JSONDecoder()
    between = re.compile(f"[{re.escape(separators)}]*+")
    found: list[CallPart] = []
    start = 0
    try:
        while start < len(text):
            data, end = decoder.raw_decode(text, start)
            written = json.dumps(_arguments(data), ensure_ascii=False, allow_nan=False)
            (data["name"] + written).encode()  # fails for half of a surrogate pair
            found += [CallBegin(data["name"]), Arguments(written, is_last=True)]
            gap = between.match(text, end)
            assert gap is not None, "the pattern matches nothing, too"
            start = gap.end()
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return found


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call: an object, ``null`` for none, or an object as a JSON text.

    Raises:
        KeyError, TypeError, ValueError: there are no arguments, or they are something else.
    """
    arguments = call[next((key for key in _ARGUMENTS_KEYS if key in call), _ARGUMENTS_KEYS[0])]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise TypeError(f"{arguments!r} is not an object")
    return arguments

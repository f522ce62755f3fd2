"""Reading tool calls whose arguments are nearly JSON, as Gemma 4 writes them."""

from __future__ import annotations

import json
import re

from deployments.parsers.call_reader import CallReader
from deployments.parsers.marks import without_part
from deployments.parsers.own_form_reader import OpenArguments, OwnFormReader
from deployments.parsers.xml_call_reader import value_of

_HEAD = re.compile(r"\s*call:\s*([\w.-]{1,128})\s*(?={)")
_QUOTE = '<|"|>'
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_SEPARATORS = {",": ", ", ":": ": "}


def gemma_call_reader(closing: str) -> CallReader:
    """Return a reader of such calls, and of those that :class:`CallReader` reads::

        call:f{city:<|"|>San Jose<|"|>,guests:2,tags:[<|"|>a<|"|>],at:{hour:7}}

    Keys have no quotes, and texts have a special mark instead of quotes, with no escapes in
    between; quotes as in JSON are read too.  Texts are passed on as they arrive.
    """
    return OwnFormReader(closing, _HEAD, lambda _: _GemmaArguments(closing))


class _GemmaArguments(OpenArguments):
    """The arguments of a call, from their opening brace on."""

    def __init__(self, closing: str) -> None:
        super().__init__()
        self._closing = closing
        self._word_end = re.compile(rf"[,:{{}}\[\]]|{re.escape(_QUOTE)}|{re.escape(closing)}")
        self._num_of_word = 0
        self._brackets: list[str] = []
        self._is_key = False
        self._end_of_text = ""

    def _next(self, text: str) -> tuple[str, str]:
        return self._inside(text) if self._end_of_text else self._between(text)

    def _inside(self, text: str) -> tuple[str, str]:
        """Continue in a text with quotes of either kind."""
        if self._end_of_text == '"':
            read = _IN_STRING.match(text)
            assert read is not None, "the pattern matches nothing, too"
            said, rest = read[0], text[read.end() :]
        else:
            shown, mark, _ = text.partition(_QUOTE)
            shown = shown if mark else without_part(shown, _QUOTE)
            said, rest = json.dumps(shown, ensure_ascii=False)[1:-1], text[len(shown) :]
        if not rest.startswith(self._end_of_text):
            return said, rest
        rest, self._end_of_text = rest.removeprefix(self._end_of_text), ""
        return f'{said}"', rest

    def _between(self, text: str) -> tuple[str, str]:
        text = text.lstrip()
        if text.startswith(self._closing):
            self.is_over = True
            return "", text
        for quote in ('"', _QUOTE):
            if text.startswith(quote):
                self._end_of_text = quote
                return '"', text.removeprefix(quote)
        if not text or any(mark.startswith(text) for mark in (self._closing, _QUOTE)):
            return "", text
        if text[0] in ",:{}[]":
            return self._mark(text[0]), text[1:]
        return self._word(text)

    def _mark(self, mark: str) -> str:
        if mark in "{[":
            self._brackets.append(mark)
        elif mark in "}]":
            self._brackets.pop()
            self.are_complete = self.is_over = not self._brackets
        if mark != ":":
            self._is_key = mark in "{," and self._brackets[-1:] == ["{"]
        else:
            self._is_key = False
        return _SEPARATORS.get(mark, mark)

    def _word(self, text: str) -> tuple[str, str]:
        """Read a key, or a value that is not a text; it is read as a whole, so something must
        follow it.  What has arrived of it is searched once, except for what may begin a mark."""
        end = self._word_end.search(text, self._num_of_word)
        if end is None:
            self._num_of_word = len(without_part(text, _QUOTE, self._closing))
            return "", text
        self._num_of_word = 0
        written = text[: end.start()].rstrip()
        value = written if self._is_key else value_of(written, None)
        return json.dumps(value, ensure_ascii=False), text[end.start() :]

"""The formats in which models write tool calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar
from uuid import uuid4

from deployments.parsers.call_elements import GLM
from deployments.parsers.call_reader import CallReader
from deployments.parsers.call_schema import json_rules, named_rules
from deployments.parsers.gemma_call_reader import gemma_call_reader
from deployments.parsers.marks import num_held
from deployments.parsers.tool_parser import Function, Part, ToolParser
from deployments.parsers.xml_call_reader import ArgumentTypes, xml_call_reader
from hdserve import grammar

_MAX_MENTIONS = 100
"""How often a text without calls may contain the mark that begins them: after each one the rest is
read again."""

_BARE_CALL = re.compile(r"<function=([\w.-]{1,128}+)>\s{0,16}+(?=<parameter=|</function>)")
"""A call without an opening mark, up to its first element."""

_BEGUN_BARE_CALL = re.compile(
    r"<function=(?:[\w.-]{0,128}+|([\w.-]{1,128}+)>\s{0,16}+(?:<[/\w]{0,10}+)?)\Z"
)
"""An end of text that may become the beginning of such a call."""

_OF_LISTS = "[],; \n\r\t"
"""What may be before, between and after calls that may be a list."""

_CALL_BEGIN, _CALL_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
"""The mark that ends a call of the DeepSeek models."""


class _MarkedToolParser(ToolParser):
    """Calls after a mark, by default JSON objects.

    White space before a call, and behind the last one, is not text.
    """

    OPEN: ClassVar[str]
    CLOSE: ClassVar[str] = ""
    """The mark that ends the calls; by default there is none."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        self._buffer = ""
        self._calls: CallReader | None = None
        self._mark = self.OPEN  # which opens the calls
        self._space = ""  # before the opening mark, which may be text
        self._has_called = False
        self._num_mentions = 0

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        return list(self._take())

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        while self._calls is not None:
            parts += [*self._end(self._calls, ""), *self._take()]
        rest, self._buffer = self._buffer, ""
        return [*parts, rest] if rest and not (self._has_called and rest.isspace()) else parts

    def _reader(self) -> CallReader:
        return CallReader(self.CLOSE)

    def _take(self) -> Iterator[Part]:
        while self._buffer:
            if self._calls is None:
                yield from self._outside()
                if self._calls is None:
                    return
            else:
                text, self._buffer = self._buffer, ""
                yield from self._calls.push(text)
                if self._calls.is_closed:
                    self._buffer = self._calls.rest
                    yield from self._end(self._calls, self._calls.closing)

    def _outside(self) -> Iterator[str]:
        opening = self._opening(self._buffer)
        if opening is not None:
            before, self._calls, self._buffer = opening
            shown = before.rstrip()
            self._space = before[len(shown) :]
        else:
            shown = self._buffer[: len(self._buffer) - self._num_held(self._buffer)]
            self._buffer = self._buffer[len(shown) :]
        if shown:
            yield shown

    def _opening(self, text: str) -> tuple[str, CallReader, str] | None:
        """Return what comes before the first calls in ``text``, their reader, and what it is to
        read."""
        before, tag, after = text.partition(self.OPEN)
        return (before, self._reader(), after) if tag else None

    def _num_held(self, text: str) -> int:
        """Return the length of the end of ``text`` that may belong to calls."""
        return num_held(text, self.OPEN)

    def _end(self, calls: CallReader, closing: str) -> Iterator[Part]:
        mark, self._calls = self._mark, None
        yield from calls.end()
        self._has_called |= calls.num_calls > 0
        if self._is_mention(calls):
            self._num_mentions += 1
            self._buffer = f"{calls.kept}{closing}{self._buffer}"
            yield f"{self._space}{mark}"
        elif not calls.num_calls:
            yield f"{self._space}{mark}{calls.kept}{closing}"
        elif calls.kept:
            yield calls.kept.removeprefix("]")  # of a list of calls

    def _is_mention(self, calls: CallReader) -> bool:
        """Whether what follows this mark is not a call, and may contain another opening mark."""
        is_none = not calls.num_calls and self._opening(calls.kept) is not None
        return is_none and self._num_mentions < _MAX_MENTIONS


class HermesToolParser(_MarkedToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write it; a
    list of calls between the marks is read, too."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def _reader(self) -> CallReader:
        return CallReader(self.CLOSE, separators=_OF_LISTS)

    @classmethod
    def grammar(cls, functions: Sequence[Function], *, is_one: bool) -> str:
        more = "" if is_one else ' ("\\n" call)*'
        rules = [f"start: call{more}", 'call: opening "\\n" json "\\n" closing']
        return grammar.lark(
            "\n".join([*rules, *json_rules(functions, cls.arguments_key)]),
            {"opening": cls.OPEN, "closing": cls.CLOSE},
        )


class Qwen3CoderToolParser(HermesToolParser):
    """``<tool_call><function=NAME><parameter=NAME>...</parameter></function></tool_call>``, as
    Qwen3-Coder writes it.  A required call has the form of Hermes, which gives the type of an
    argument.

    After a sentence the model often omits ``<tool_call>``.  A call of one of ``functions`` is
    recognised without it too, from its first element on.
    """

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        super().__init__(functions)
        self._types = ArgumentTypes(functions)
        self._names = frozenset(function.name for function in functions)

    def _reader(self) -> CallReader:
        return xml_call_reader(self.CLOSE, self._types)

    def _opening(self, text: str) -> tuple[str, CallReader, str] | None:
        calls = _BARE_CALL.finditer(text) if "<function=" in text else ()
        start = next((call.start() for call in calls if call[1] in self._names), None)
        if start is None or self.OPEN in text[:start]:
            return super()._opening(text)
        return text[:start], xml_call_reader(self.CLOSE, self._types, is_bare=True), text[start:]

    def _num_held(self, text: str) -> int:
        begun = _BEGUN_BARE_CALL.search(text) if "<function=" in text else None
        if begun is None or (begun[1] and begun[1] not in self._names):
            return num_held(text, self.OPEN, "<function=")
        return len(text) - len(text[: begun.start()].rstrip())


class GlmToolParser(HermesToolParser):
    """``<tool_call>NAME<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>``, as GLM-4.5
    and later ones write it.  A required call has the form of Hermes."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        super().__init__(functions)
        self._types = ArgumentTypes(functions)

    def _reader(self) -> CallReader:
        return xml_call_reader(self.CLOSE, self._types, GLM)


class MistralToolParser(_MarkedToolParser):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, as Mistral writes it."""

    OPEN = "[TOOL_CALLS]"

    def _reader(self) -> CallReader:
        return CallReader(separators=_OF_LISTS)

    @classmethod
    def grammar(cls, functions: Sequence[Function], *, is_one: bool) -> str:
        more = "" if is_one else ' ("," " "? json)*'
        rules = [f'start: opening / {{0,2}}/ "[" json{more} "]"']  # as its tokens begin with one
        return grammar.lark(
            "\n".join([*rules, *json_rules(functions, cls.arguments_key)]), {"opening": cls.OPEN}
        )

    @classmethod
    def call_id(cls) -> str:
        """Return an id of nine characters, since Mistral's templates refuse others."""
        return uuid4().hex[:9]


class GraniteToolParser(MistralToolParser):
    """``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``, as Granite 3 writes it.  From 3.1
    on it often spells ``<tool_call>`` before the list, which may be closed."""

    OPEN = "<|tool_call|>"
    _SPELLED = "<tool_call>"

    def _opening(self, text: str) -> tuple[str, CallReader, str] | None:
        places = {mark: text.find(mark) for mark in (self.OPEN, self._SPELLED) if mark in text}
        if not places:
            return None
        self._mark = min(places, key=places.__getitem__)
        before, _, after = text.partition(self._mark)
        closing = HermesToolParser.CLOSE if self._mark == self._SPELLED else ""
        return before, CallReader(closing, separators=_OF_LISTS), after

    def _num_held(self, text: str) -> int:
        return num_held(text, self.OPEN, self._SPELLED)

    @classmethod
    def call_id(cls) -> str:
        return ToolParser.call_id()


class MistralArgsToolParser(MistralToolParser):
    """``[TOOL_CALLS]NAME[ARGS]{...}``, several one after the other, as newer models of Mistral
    write it."""

    CLOSE = MistralToolParser.OPEN
    _HEAD = r"([\w.-]{1,128})(?:\[CALL_ID\]\w*)?\[ARGS\]\s*(?={)"

    def _reader(self) -> CallReader:
        return CallReader(self.CLOSE, head=self._HEAD, is_enclosed=False)

    def _end(self, calls: CallReader, closing: str) -> Iterator[Part]:
        self._buffer = closing + self._buffer  # it opens the next call
        yield from super()._end(calls, "")

    @classmethod
    def grammar(cls, functions: Sequence[Function], *, is_one: bool) -> str:
        rules = [
            f"start: (opening call){'' if is_one else '+'}",
            *named_rules(functions, "", "args"),
        ]
        return grammar.lark("\n".join(rules), {"opening": cls.OPEN, "args": "[ARGS]"})


class DeepSeekV31ToolParser(_MarkedToolParser):
    """Calls ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`` between two further
    marks, as DeepSeek-V3.1 writes them."""

    OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    _HEAD = rf"(?:{_CALL_END})?\s*{_CALL_BEGIN}([\w.-]{{1,128}}){_CALL_SEPARATOR}\s*(?={{)"
    _ENDING = _CALL_END
    _MORE = "one*"

    def _reader(self) -> CallReader:
        return CallReader(self.CLOSE, head=self._HEAD, ending=self._ENDING, is_enclosed=False)

    @classmethod
    def grammar(cls, functions: Sequence[Function], *, is_one: bool) -> str:
        more = "" if is_one else cls._MORE
        rules = [f"start: opening one {more} closing", *cls._rules(functions)]
        marks = {"begin": _CALL_BEGIN, "separator": _CALL_SEPARATOR, "end": _CALL_END}
        return grammar.lark("\n".join(rules), {"opening": cls.OPEN, "closing": cls.CLOSE, **marks})

    @classmethod
    def _rules(cls, functions: Sequence[Function]) -> Iterator[str]:
        yield "one: begin call end"
        yield from named_rules(functions, "", "separator")


class DeepSeekV3ToolParser(DeepSeekV31ToolParser):
    """Calls as in :class:`DeepSeekV31ToolParser`, but with ``function<｜tool▁sep｜>NAME`` and, on
    lines of their own, the arguments as a ``json`` block of Markdown, as DeepSeek-V3 and
    DeepSeek-R1 write them."""

    _HEAD = (
        rf"(?:(?:```)?\s*{_CALL_END})?\s*{_CALL_BEGIN}function{_CALL_SEPARATOR}"
        r"([\w.-]{1,128})\s*```json\s*(?={)"
    )
    _ENDING = f"```{_CALL_END}"
    _MORE = '("\\n" one)*'

    @classmethod
    def _rules(cls, functions: Sequence[Function]) -> Iterator[str]:
        yield 'one: begin "function" separator call "\\n```" end'
        yield from named_rules(functions, "", '"\\n```json\\n"')


class GemmaToolParser(_MarkedToolParser):
    """``<|tool_call>call:NAME{...}<tool_call|>``, as Gemma 4 writes it.  The arguments of a
    required call are JSON."""

    OPEN, CLOSE = "<|tool_call>", "<tool_call|>"

    def _reader(self) -> CallReader:
        return gemma_call_reader(self.CLOSE)

    @classmethod
    def grammar(cls, functions: Sequence[Function], *, is_one: bool) -> str:
        rules = [f"start: one{'' if is_one else '+'}", "one: opening call closing"]
        return grammar.lark(
            "\n".join([*rules, *named_rules(functions, "call:", "")]),
            {"opening": cls.OPEN, "closing": cls.CLOSE},
        )


class HarmonyToolParser(_MarkedToolParser):
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``, as
    gpt-oss writes it, one in an answer; the channels are separated by
    :class:`~deployments.parsers.harmony_parser.HarmonyParser`."""

    OPEN, CLOSE = "<|channel|>commentary to=functions.", "<|call|>"
    _HEAD = r"([\w.-]{1,128}+)[^{<]*+(?:<\|constrain\|>[^{<]*+)?<\|message\|>\s*(?={)"

    def _reader(self) -> CallReader:
        return CallReader(self.CLOSE, head=self._HEAD)

    @classmethod
    def grammar(cls, functions: Sequence[Function], *, is_one: bool) -> str:
        marks = {name: f"<|{name}|>" for name in ("channel", "constrain", "message")}
        before, after = "commentary to=functions.", 'constrain "json" message'
        rules = named_rules(functions, before, f'" " {after}')
        return grammar.lark("\n".join(["start: channel call", *rules]), marks)


class Llama3JsonToolParser(ToolParser):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, several with ``;`` between them,
    as Llama 3.1 and 3.2 write it."""

    arguments_key = "parameters"
    _TAG = "<|python_tag|>"

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        self._buffer = ""
        self._calls: CallReader | None = None
        self._is_text = False

    def push(self, text: str) -> list[Part]:
        if self._is_text:
            return [text] if text else []
        if self._calls is not None:
            return [*self._calls.push(text)]
        self._buffer += text
        begun = self._buffer.lstrip()
        if begun.startswith(("{", self._TAG)):
            self._calls = CallReader()
            calls = begun.removeprefix(self._TAG)
            self._buffer = self._buffer.removesuffix(calls)
            return [*self._calls.push(calls)]
        if self._TAG.startswith(begun):
            return []
        self._is_text = True
        return [self._buffer]

    def finish(self) -> list[Part]:
        if self._calls is None:
            return [self._buffer] if self._buffer and not self._is_text else []
        parts: list[Part] = [*self._calls.end()]
        rest = self._calls.kept if self._calls.num_calls else self._buffer + self._calls.kept
        return [*parts, rest] if rest else parts

    @classmethod
    def grammar(cls, functions: Sequence[Function], *, is_one: bool) -> str:
        more = "" if is_one else ' ("; " json)*'
        rules = json_rules(functions, cls.arguments_key)
        return grammar.lark("\n".join([f"start: json{more}", *rules]))


TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
    "llama3_json": Llama3JsonToolParser,
    "mistral": MistralToolParser,
    "mistral_args": MistralArgsToolParser,
    "granite": GraniteToolParser,
    "deepseek_v3": DeepSeekV3ToolParser,
    "deepseek_v31": DeepSeekV31ToolParser,
    "harmony": HarmonyToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
    "glm": GlmToolParser,
    "gemma": GemmaToolParser,
}
"""The parsers by their names in ``tool_parser`` of the configuration."""

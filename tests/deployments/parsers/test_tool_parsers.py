"""Tool calls are read out of what a model writes, however it is cut into pieces."""

from __future__ import annotations

import json
import re
from time import thread_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.parsers.call_reader import Arguments, CallBegin, CallReader
from deployments.parsers.tool_parser import Function, Part, ToolParser
from deployments.parsers.tool_parsers import (
    TOOL_PARSERS,
    DeepSeekV3ToolParser,
    DeepSeekV31ToolParser,
    GemmaToolParser,
    GlmToolParser,
    GraniteToolParser,
    HarmonyToolParser,
    HermesToolParser,
    Llama3JsonToolParser,
    MistralArgsToolParser,
    MistralToolParser,
    Qwen3CoderToolParser,
)
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.tokenization.tokenizer import Tokenizer
from tests.deployments.parsers.calls import ToolCall, joined
from tests.deployments.parsers.work import CountedText, counted_calls

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</b>",  "n": [1]}}\n</tool_call>'
READ = ToolCall("f", '{"a": "</b>",  "n": [1]}')
INSIDE = r'{"a": "\"}</tool_call>\\", "b": [{}]}'
TORN = '{"a": \'it"s\'}}\n'

HERMES: list[tuple[str, str, list[ToolCall]]] = [
    ("plain text < 5, <tool", "plain text < 5, <tool", []),
    (CALL, "", [READ]),
    (f"Let me look.\n\n{CALL}\n{CALL}\n", "Let me look.", [READ, READ]),
    (CALL.removesuffix("\n</tool_call>"), "", [READ]),
    ("<tool_call>{broken</tool_call> on", "<tool_call>{broken</tool_call> on", []),
    ("<tool_call>{broken", "<tool_call>{broken", []),
    ('<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
    ("spaces  \n kept ", "spaces  \n kept ", []),
    # A call is one from its arguments on, complete or not; before, it is text.
    (CALL[:50], "", [ToolCall("f", '{"a": "</b>')]),
    (CALL[:30], CALL[:30], []),
    (CALL[:-4], "", [READ]),
    (f"{CALL}\n{CALL[:25]}", f"\n{CALL[:25]}", [READ]),
    # As it was written, and a closing mark in a string closes nothing ...
    (f'<tool_call>{{"name": "f", "arguments": {INSIDE}}}</tool_call>', "", [ToolCall("f", INSIDE)]),
    # ... unless there can be no string.
    (f'<tool_call>{{"name": "f", "arguments": {TORN}</tool_call>b', "b", [ToolCall("f", TORN)]),
    ('<tool_call>{"name": "f", "arguments": {]</tool_call>b', "b", [ToolCall("f", "{]")]),
    # Other orders, other keys, several calls between two marks, an end that is missing.
    ('<tool_call>{"arguments": {"a":"ü"}, "name": "é"}', "", [ToolCall("é", '{"a": "ü"}')]),
    ('<tool_call>{"name":"f","arguments":{},"id":[2]}</tool_call>', "", [ToolCall("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}} so</tool_call>',
        " so",
        [ToolCall("f", "{}"), ToolCall("g", "{}")],
    ),
    *(
        (f"<tool_call>{calls}</tool_call>", "", [ToolCall("f", "{}"), ToolCall("g", "{}")])
        for calls in (
            '{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}',
            '{"arguments": {}, "name": "f"}, {"arguments": {}, "name": "g"}',
        )
    ),
    (
        '<tool_call>{"name": "f", "arguments": {}</tool_call>\n<tool_call>',
        "\n<tool_call>",
        [ToolCall("f", "{}")],
    ),
    ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    # A mark that is text hides none that is not.
    (f"In `<tool_call>` tags: {CALL} so", "In `<tool_call>` tags: so", [READ]),
    (f"In a <tool_call> tag: {CALL}", "In a <tool_call> tag:", [READ]),
    (f"`<tool_call>`: {CALL[:-4]}", "`<tool_call>`:", [READ]),
    (f"<tool_call>{{broken\n{CALL}\n{CALL}", "<tool_call>{broken", [READ, READ]),
    ("<tool_call><tool_call> <tool", "<tool_call><tool_call> <tool", []),
    ("<tool_call>" * 200 + CALL, "<tool_call>" * 200 + CALL, []),
    *(
        (text, text, [])  # half of a surrogate pair, which cannot be sent, and what no JSON has
        for text in (
            '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>',
            '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>',
            '<tool_call>{"arguments": {"q": "\\ud83d"}, "name": "f"}</tool_call>',
            '<tool_call>{"arguments": {}, "name": "\\ud83d"}</tool_call>',
        )
    ),
]
F = ToolCall("f", "{}")
LLAMA: list[tuple[str, str, list[ToolCall]]] = [
    ("plain text", "plain text", []),
    ('{"name": "f", "parameters": {"a": 1}}', "", [ToolCall("f", '{"a": 1}')]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', "", [ToolCall("f", "{}")]),
    (
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        "",
        [ToolCall("f", "{}"), ToolCall("g", "{}")],
    ),
    ('{"no": "call"}', '{"no": "call"}', []),
    (' <|python_tag|>{"name": "f"', ' <|python_tag|>{"name": "f"', []),
    (' <|python_tag|>{"name": "f", "parameters": {"a', "", [ToolCall("f", '{"a')]),
    ('{"name": "f", "parameters": {}}; {"na', '; {"na', [ToolCall("f", "{}")]),
    ("  text { here", "  text { here", []),
]
MISTRAL: list[tuple[str, str, list[ToolCall]]] = [
    ("plain [TOOL_text", "plain [TOOL_text", []),
    ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}]', "", [ToolCall("f", '{"a": [1]}')]),
    (
        'So:\n[TOOL_CALLS][{"name": "f", "arguments": {}}, {"arguments": {}, "name": "g"}]\n',
        "So:",
        [ToolCall("f", "{}"), ToolCall("g", "{}")],
    ),
    ('[TOOL_CALLS]{"name": "f", "arguments": {}, "id": "abcdefghi"}', "", [ToolCall("f", "{}")]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}] so', " so", [ToolCall("f", "{}")]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {"a": "]', "", [ToolCall("f", '{"a": "]')]),
    ('[TOOL_CALLS][{"name": "f", "arg', '[TOOL_CALLS][{"name": "f", "arg', []),
    ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("[TOOL_CALLS]f", "[TOOL_CALLS]f", []),
    ('`[TOOL_CALLS]`: [TOOL_CALLS][{"name": "f", "arguments": {}}]', "`[TOOL_CALLS]`:", [F]),
]
HARMONY_CALL = "<|channel|>commentary to=functions."
HARMONY: list[tuple[str, str, list[ToolCall]]] = [
    ("plain <|channel|>comm", "plain <|channel|>comm", []),
    (
        f'Well. {HARMONY_CALL}f <|constrain|>json<|message|>{{"a": "<|call|>"}}<|call|>',
        "Well.",
        [ToolCall("f", '{"a": "<|call|>"}')],
    ),
    (
        f"{HARMONY_CALL}f<|message|>{{}}<|call|>{HARMONY_CALL}g json<|message|>{{",
        "",
        [ToolCall("f", "{}"), ToolCall("g", "{")],
    ),
    (f"{HARMONY_CALL}f<|message|>x<|call|> y", f"{HARMONY_CALL}f<|message|>x<|call|> y", []),
    (f"{HARMONY_CALL}f<|mess", f"{HARMONY_CALL}f<|mess", []),
    (f"{HARMONY_CALL}{'f' * 130}<|message|>{{}}", "", [ToolCall("f" * 128, "{}")]),
]
MISTRAL_ARGS: list[tuple[str, str, list[ToolCall]]] = [
    ('So [TOOL_CALLS]f[ARGS]{"a": [1]}', "So", [ToolCall("f", '{"a": [1]}')]),
    (
        '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]ab1[ARGS] {}',
        "",
        [ToolCall("f", '{"a": "[TOOL_CALLS]"}'), ToolCall("g", "{}")],
    ),
    ("[TOOL_CALLS]f[ARGS]x[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]f[ARGS]x", [ToolCall("g", "{}")]),
    ('[TOOL_CALLS]f[ARGS]{"a": [', "", [ToolCall("f", '{"a": ')]),
    # What is behind the arguments is no part of the call.
    ('[TOOL_CALLS]f[ARGS]{} so "', ' so "', [F]),
    ('[TOOL_CALLS]f[ARGS]{} a "b[TOOL_CALLS]g[ARGS]{}', ' a "b', [F, ToolCall("g", "{}")]),
    ("[TOOL_CALLS]f[ARGS]{}\n[TOOL_CALLS]g[ARGS]{}\n", "", [F, ToolCall("g", "{}")]),
    ("[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR", []),
]
GRANITE = [
    tuple(part.replace("[TOOL_CALLS]", "<|tool_call|>") for part in case[:2]) + case[2:]
    for case in MISTRAL
    if "[TOOL_text" not in case[0]
]
SPELLED: list[tuple[str, str, list[ToolCall]]] = [
    (
        'So:\n<tool_call>[{"arguments": {"a": 1}, "name": "f"}]',
        "So:",
        [ToolCall("f", '{"a": 1}')],
    ),
    ('<tool_call>[{"name": "f", "arguments": {}}]</tool_call> so', " so", [F]),
    ('<tool_call>{"name": "f", "arguments": {}}\n</tool_call>', "", [F]),
    ("a <tool_call> b", "a <tool_call> b", []),
    ("a <tool_call>b</tool_call> c", "a <tool_call>b</tool_call> c", []),
    ('<tool_call>: <|tool_call|>[{"name": "f", "arguments": {}}]', "<tool_call>:", [F]),
    ('`<|tool_call|>`: <tool_call>[{"name": "f", "arguments": {}}]', "`<|tool_call|>`:", [F]),
    ("a <tool_c", "a <tool_c", []),
]
LISTS: list[tuple[str, str, list[ToolCall]]] = [
    (
        '<tool_call>[\n{"name": "f", "arguments": {}},\n{"name": "g", "arguments": {}}\n]'
        "</tool_call>",
        "",
        [F, ToolCall("g", "{}")],
    ),
    ('<tool_call>[{"arguments": {}, "name": "f"}]</tool_call> so', " so", [F]),
    ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
]
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
V31 = f'{BEGIN}f{SEPARATOR}{{"a": "{END}{CALLS_END}"}}{END}'
V31_F = ToolCall("f", f'{{"a": "{END}{CALLS_END}"}}')
DEEPSEEK_V31: list[tuple[str, str, list[ToolCall]]] = [
    (f"plain text {CALLS_BEGIN[:8]}", f"plain text {CALLS_BEGIN[:8]}", []),
    (f"So:\n{CALLS_BEGIN}{V31}{CALLS_END}", "So:", [V31_F]),
    (f"{CALLS_BEGIN}{V31}{V31}{CALLS_END} so", " so", [V31_F, V31_F]),
    (f"{CALLS_BEGIN}{V31}", "", [V31_F]),
    (f"{CALLS_BEGIN}{V31}"[: -len(END) + 3], "", [V31_F]),
    (f'{CALLS_BEGIN}{BEGIN}f{SEPARATOR}{{"a": [', "", [ToolCall("f", '{"a": [')]),
    (f"{CALLS_BEGIN}{BEGIN}f{SEPARATOR}x{END}", f"{CALLS_BEGIN}{BEGIN}f{SEPARATOR}x{END}", []),
    (f"{CALLS_BEGIN}{BEGIN}f", f"{CALLS_BEGIN}{BEGIN}f", []),
    (f"{CALLS_BEGIN}\n ;\v\n{V31}\v\n{V31}\n{CALLS_END}", "", [V31_F, V31_F]),
    (f"{CALLS_BEGIN}\n\n{END}\v\n{V31}", "", [V31_F]),
]
V3 = f'{BEGIN}function{SEPARATOR}f\n```json\n{{"a": "```"}}\n```{END}'
V3_F = ToolCall("f", '{"a": "```"}')
DEEPSEEK_V3: list[tuple[str, str, list[ToolCall]]] = [
    (f"I will.{CALLS_BEGIN}{V3}{CALLS_END}", "I will.", [V3_F]),
    (f"{CALLS_BEGIN}{V3}\n{V3}{CALLS_END}", "", [V3_F, V3_F]),
    *((f"{CALLS_BEGIN}{V3}"[:-cut], "", [V3_F]) for cut in (1, len(END), len(END) + 2)),
    (f"{CALLS_BEGIN}{V3}"[: -len(END) - 7], "", [ToolCall("f", '{"a": "``')]),
    (f"{CALLS_BEGIN}{V31}{CALLS_END}", f"{CALLS_BEGIN}{V31}{CALLS_END}", []),
    (f"{CALLS_BEGIN}\n\n```\v\n{END}\n\v{V3}\n\v\n{V3}", "", [V3_F, V3_F]),
]
CASES = [
    *((HermesToolParser, *case) for case in HERMES),
    *((Qwen3CoderToolParser, *case) for case in HERMES),
    *((GlmToolParser, *case) for case in HERMES),
    *((Llama3JsonToolParser, *case) for case in LLAMA),
    *((MistralToolParser, *case) for case in MISTRAL),
    *((MistralArgsToolParser, *case) for case in MISTRAL_ARGS),
    *((HarmonyToolParser, *case) for case in HARMONY),
    *((GraniteToolParser, *case) for case in (*GRANITE, *SPELLED)),
    *((HermesToolParser, *case) for case in LISTS),
    *((DeepSeekV31ToolParser, *case) for case in DEEPSEEK_V31),
    *((DeepSeekV3ToolParser, *case) for case in DEEPSEEK_V3),
]
JSON_PARSERS = (
    HermesToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
    GraniteToolParser,
    Qwen3CoderToolParser,
    GlmToolParser,
)


def read(parser: type[ToolParser], pieces: list[str]) -> tuple[str, list[ToolCall]]:
    made = parser()
    parts: list[Part] = []
    for piece in pieces:
        parts += made.push(piece)
    return joined([*parts, *made.finish()])


@pytest.mark.parametrize(("parser", "text", "plain", "calls"), CASES)
def test_calls_are_read(
    parser: type[ToolParser], text: str, plain: str, calls: list[ToolCall]
) -> None:
    """Text and calls are told apart; what is no call after all is text, unchanged."""
    assert read(parser, [text]) == (plain, calls)
    assert read(parser, list(text)) == (plain, calls)


ARGUMENTS_READ: list[tuple[str, str | None]] = [
    ('{"a": 1}', '{"a": 1}'),
    ("null", "{}"),
    (r'"{\"a\":  \"\u00fc\"}"', '{"a": "ü"}'),
    ('"null"', "{}"),
    ('"x"', None),
    (r'"{\"a\": \"\\ud83d\"}"', None),
    ("[1]", None),
    ("5", None),
]


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("parser", JSON_PARSERS)
@pytest.mark.parametrize(("arguments", "read_as"), ARGUMENTS_READ)
def test_arguments_have_either_name(
    parser: type[ToolParser], arguments: str, read_as: str | None, key: str
) -> None:
    """Models mix them up; what is ``null`` or the text of an object is one."""
    answer = written(parser, [ToolCall("f", arguments), ToolCall("g", "{}")], key)
    for size in (1, 3, len(answer)):
        pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
        plain, calls = read(parser, pieces)
        if read_as is not None:
            assert (plain, calls) == ("", [ToolCall("f", read_as), ToolCall("g", "{}")]), size
        else:
            assert ToolCall("f", arguments) not in calls, size
            assert plain, size


def test_ids_are_those_the_templates_take() -> None:
    """Mistral's refuse others than of nine letters and digits."""
    assert re.fullmatch("[0-9a-zA-Z]{9}", MistralToolParser.call_id())
    assert re.fullmatch("call_[0-9a-f]{24}", HermesToolParser.call_id())


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 120), max_size=6))
def test_cuts_change_nothing(case: Any, cuts: list[int]) -> None:
    """A stream gives what the whole answer gives, wherever it is cut."""
    parser, text, plain, calls = case
    ends = [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    starts = [0, *ends[:-1]]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    assert read(parser, pieces) == (plain, calls)


JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='<>/tol_cal{}[]",;:\\\n é', max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), JSON, max_size=3)


@pytest.mark.parametrize("parser", TOOL_PARSERS.values())
@given(data=st.data())
def test_streamed_calls_are_those_of_the_whole_answer(
    parser: type[ToolParser], data: st.DataObject
) -> None:
    """Whatever the arguments are, and wherever the answer is cut or cut off."""
    calls = [
        ToolCall(f"f{index}", json.dumps(arguments, ensure_ascii=data.draw(st.booleans())))
        for index, arguments in enumerate(data.draw(st.lists(ARGUMENTS, min_size=1, max_size=3)))
    ]
    answer = written(parser, calls)
    plain = "" if parser is Llama3JsonToolParser else "Let me see. "
    assert read(parser, [plain + answer]) == (plain.rstrip(), calls)
    answer = (plain + answer)[: data.draw(st.integers(0, len(plain + answer)))]
    pieces = []
    while answer:
        size = data.draw(st.integers(1, 12))
        pieces.append(answer[:size])
        answer = answer[size:]
    assert read(parser, pieces) == read(parser, ["".join(pieces)])
    for found, call in zip(read(parser, pieces)[1], calls, strict=False):
        assert found.name == call.name
        assert call.arguments.startswith(found.arguments)


@pytest.mark.parametrize("parser", TOOL_PARSERS.values())
def test_arguments_are_streamed_as_they_come(parser: type[ToolParser]) -> None:
    """The name as soon as it is certain, then each character, but what belongs to no argument."""
    opening, closing = MARKS.get(parser, ("", ""))
    made = parser()
    named = NAMED.get(parser, f'{{"name": "f", "{parser.arguments_key}": ')
    assert made.push(f"{opening}{named}") == []
    assert made.push("{") == [CallBegin("f"), Arguments("{", is_last=False)]
    assert made.push('"a": "<') == [Arguments('"a": "<', is_last=False)]
    ending = '"}' if parser in NAMED else '"}}'
    assert made.push(ending) == [Arguments('"}', is_last=True)]
    assert made.push(closing) == []
    assert made.finish() == []


@pytest.mark.parametrize("piece", ["\n", "word ", ", "])
@pytest.mark.parametrize("parser", TOOL_PARSERS.values())
def test_a_head_is_looked_for_where_one_may_end(parser: type[ToolParser], piece: str) -> None:
    """Not from its beginning with every token: a model may write line breaks without end, and the
    thread that reads them is that of all requests."""
    made = parser()
    made.push(getattr(parser, "OPEN", "{"))
    with counted_calls() as calls:
        for _ in range(50):
            assert made.push(piece) == []
    assert not calls["match"]
    assert not calls["search"]


@pytest.mark.parametrize("piece", ["x> ", '{ "', "{x> ", '{"n', "\n>"])
@pytest.mark.parametrize("parser", TOOL_PARSERS.values())
def test_no_head_is_looked_for_in_what_will_begin_with_none(
    parser: type[ToolParser], piece: str
) -> None:
    """However often it has what may end one, behind whatever is passed over before one."""
    made = parser()
    made.push(getattr(parser, "OPEN", "{"))
    with counted_calls() as calls:
        for _ in range(50):
            assert made.push(piece) == []
    assert calls["match"] <= 3


@pytest.mark.parametrize("piece", ["word ", "</tool_call"])
def test_what_is_no_call_yet_is_looked_through_once_for_its_end(piece: str) -> None:
    reader = CallReader("</tool_call>")
    reader.kept = kept = CountedText("")
    for _ in range(500):
        assert reader.push(piece) == []
    assert kept.counts["characters"] < 500 * 25
    assert reader.push("</tool") == reader.push("_call> so") == []
    assert (reader.kept, reader.rest) == (piece * 500, " so")


@pytest.mark.parametrize("parser", TOOL_PARSERS.values())
def test_white_space_before_a_head_is_passed_over_once(parser: type[ToolParser]) -> None:
    """Where each of its characters were tried as the beginning of the rest, this would take ten
    seconds instead of some milliseconds."""
    opening = getattr(parser, "OPEN", "{")
    text = f"{opening}{chr(10) * 100_000}{{"
    before = thread_time()
    assert read(parser, [text]) == (text, [])
    assert thread_time() - before < 2


def test_calls_that_are_read_at_the_end_are_each_read_once() -> None:
    """Without copies of all those behind, for each of them."""
    reader = CallReader()
    reader.kept = text = CountedText('{"arguments": {}, "name": "f"}, ' * 500)
    assert reader.end() == [CallBegin("f"), Arguments("{}", is_last=True)] * 500
    assert text.counts["characters"] < 3 * len(text)


MARKS = {
    HermesToolParser: ("<tool_call>\n", "\n</tool_call>"),
    Qwen3CoderToolParser: ("<tool_call>\n", "\n</tool_call>"),
    GlmToolParser: ("<tool_call>\n", "\n</tool_call>"),
    MistralToolParser: ("[TOOL_CALLS] [", "]"),
    GraniteToolParser: ("<|tool_call|>[", "]"),
    GemmaToolParser: ("<|tool_call>", "<tool_call|>"),
    DeepSeekV31ToolParser: (CALLS_BEGIN, f"{END}{CALLS_END}"),
    DeepSeekV3ToolParser: (CALLS_BEGIN, f"\n```{END}{CALLS_END}"),
}
NAMED = {
    HarmonyToolParser: f"{HARMONY_CALL}f<|message|>",
    MistralArgsToolParser: "[TOOL_CALLS]f[ARGS]",
    GemmaToolParser: "call:f",
    DeepSeekV31ToolParser: f"{BEGIN}f{SEPARATOR}",
    DeepSeekV3ToolParser: f"{BEGIN}function{SEPARATOR}f\n```json\n",
}
"""What comes before the arguments where they are not in an object."""


def written(parser: type[ToolParser], calls: list[ToolCall], key: str = "") -> str:
    """As models write it."""
    if parser is HarmonyToolParser:
        return "<|call|>".join(
            f"{HARMONY_CALL}{call.name} <|constrain|>json<|message|>{call.arguments}"
            for call in calls
        )
    if parser is MistralArgsToolParser:
        return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments}" for call in calls)
    if parser is GemmaToolParser:
        items = [f"call:{call.name}{call.arguments}" for call in calls]
        return "".join(f"<|tool_call>{item}<tool_call|>" for item in items)
    if parser is DeepSeekV31ToolParser:
        items = [f"{BEGIN}{call.name}{SEPARATOR}{call.arguments}{END}" for call in calls]
        return "".join([CALLS_BEGIN, *items, CALLS_END])
    if parser is DeepSeekV3ToolParser:
        blocks = [f"{call.name}\n```json\n{call.arguments}\n```" for call in calls]
        items = [f"{BEGIN}function{SEPARATOR}{block}{END}" for block in blocks]
        return CALLS_BEGIN + "\n".join(items) + CALLS_END
    texts = [
        f'{{"name": "{call.name}", "{key or parser.arguments_key}": {call.arguments}}}'
        for call in calls
    ]
    if parser is MistralToolParser:
        return f"[TOOL_CALLS] [{', '.join(texts)}]"
    if parser is GraniteToolParser:
        return f"<|tool_call|>[{', '.join(texts)}]"
    if issubclass(parser, HermesToolParser):
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return "; ".join(texts)


@given(st.text(alphabet='<tol_cal>{}/\n x"', max_size=60))
def test_text_without_calls_survives(text: str) -> None:
    """Nothing that is no call is lost."""
    for parser in JSON_PARSERS:
        assert read(parser, list(text)) == (text, [])


MARKED_PARSERS = [each for each in TOOL_PARSERS.values() if each is not Llama3JsonToolParser]


@pytest.mark.parametrize("parser", MARKED_PARSERS)
def test_white_space_before_a_mark_is_text_if_no_call_follows(parser: Any) -> None:
    """Wherever the answer is cut, and where another mark follows."""
    for text in (f"Wrap it in a\n {parser.OPEN} tag.", f"a {parser.OPEN} \n{parser.OPEN} b"):
        assert read(parser, list(text)) == (text, [])
        for cut in range(len(text) + 1):
            assert read(parser, [text[:cut], text[cut:]]) == (text, [])


def test_text_is_streamed_as_it_comes() -> None:
    """Only what may belong to a call is held back."""
    parser = HermesToolParser()
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" ") == []
    assert parser.push("there <too") == [" there"]
    assert parser.push("t") == [" <toot"]


FUNCTIONS = [
    Function(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "$defs": {"city": {"enum": ["Seoul"]}},
        },
    ),
    Function("now", {"type": "object", "properties": {}, "additionalProperties": False}),
]


@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("parser", TOOL_PARSERS.values())
def test_grammars_and_parsers_agree(
    parser: type[ToolParser], is_one: bool, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """What a grammar allows, its parser reads; other functions, arguments and text it forbids."""
    text = parser.grammar(FUNCTIONS, is_one=is_one)

    def allows(answer: str) -> bool:
        state = grammars.state(text)
        for token_id in [*tokenizer.encode(answer), 2]:
            if state.is_complete and token_id != 2:
                return False
            state.push(token_id)
        return state.error is None

    def call(name: str, arguments: dict[str, Any]) -> str:
        return written(parser, [ToolCall(name, json.dumps(arguments))])

    weather, now = call("get_weather", {"city": "Seoul"}), call("now", {})
    both = written(parser, [ToolCall("get_weather", '{"city": "Seoul"}'), ToolCall("now", "{}")])
    assert allows(weather)
    assert allows(now)
    assert allows(both) is not (is_one or parser is HarmonyToolParser)  # gpt-oss makes one
    assert [found.name for found in read(parser, [both])[1]] == ["get_weather", "now"]
    for wrong in (call("then", {}), call("now", {"a": 1}), f"So: {now}"):
        assert not allows(wrong)


REFERENCES = {
    "node": {"$ref": "#"},
    "label": {"type": "string"},
    "same": {"$ref": "#/properties/label"},
}
REFERRING: list[tuple[dict[str, Any], str, str]] = [
    (
        {"type": "object", "properties": REFERENCES, "additionalProperties": False},
        '{"node": {"node": {}, "label": "a"}, "same": "b"}',
        '{"node": {"name": "f", "arguments": {}}}',
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/const",
            "definitions": {
                "const": {
                    "type": "object",
                    "properties": {"x/y": {"anyOf": [{"type": "integer"}, {"$ref": "#"}]}},
                    "additionalProperties": False,
                }
            },
        },
        '{"x/y": {"x/y": 1}}',
        '{"x/y": "a"}',
    ),
    (
        {
            "$id": "https://example.org/f",
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"const": {"$ref": "#"}}},
            "$defs": {"a": {"type": "integer"}},
        },
        '{"a": 1, "b": {"$ref": "#"}}',
        '{"a": "x"}',
    ),
    (
        {
            "type": "object",
            "properties": {"list": {"type": "array", "items": {"$ref": "#"}}},
            "additionalProperties": False,
        },
        '{"list": [{"list": []}]}',
        '{"list": [{"name": "f", "arguments": {}}]}',
    ),
    (
        {"type": "object", "properties": {"b": {"enum": [{"$ref": "#"}]}}},
        '{"b": {"$ref": "#"}}',
        '{"b": {}}',
    ),
]


@pytest.mark.parametrize("parser", [HermesToolParser, Llama3JsonToolParser, MistralArgsToolParser])
@pytest.mark.parametrize(("parameters", "allowed", "forbidden"), REFERRING)
def test_parameters_refer_to_themselves(
    parser: type[ToolParser],
    parameters: dict[str, Any],
    allowed: str,
    forbidden: str,
    tokenizer: Tokenizer,
    grammars: Grammars,
) -> None:
    """The root of a reference in them is the schema the client sent, not that of a call: one with
    either key for its arguments, or with none, as all calls are."""
    text = parser.grammar([Function("f", parameters)], is_one=True)

    def allows(arguments: str) -> bool:
        state = grammars.state(text)
        for token_id in tokenizer.encode(written(parser, [ToolCall("f", arguments)])):
            state.push(token_id)
        return state.error is None

    assert allows(allowed)
    assert not allows(forbidden)

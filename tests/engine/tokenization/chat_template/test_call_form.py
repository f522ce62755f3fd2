"""Conversations with calls of tools go on with templates that take them in one way only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hdserve.conversation import ChatEnd
from hdserve.engine.tokenization.chat_template.call_form import CallForm
from hdserve.engine.tokenization.tokenizer import load_tokenizer
from hdserve.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f1", "parameters": {"type": "object"}}}

GPT_OSS = """
{%- set last = namespace(name=none) %}
{%- for m in messages %}
    {%- if "tool_calls" in m %}
        {%- if m.content and m.thinking %}{{ raise_exception("not both") }}{% endif %}
        {%- if m.content or m.thinking %}<analysis>{{ m.content or m.thinking }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {%- set last.name = call.name %}<call:{{ call.name }}>{{ call.arguments | tojson }}
    {%- elif m.role == "tool" %}<{{ last.name }}>{{ m.content }}
    {%- else %}<{{ m.role }}>{{ m.content }}
    {%- endif %}
{%- endfor %}"""

LLAMA = """
{%- for m in messages %}
    {%- if "tool_calls" in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception("single calls only") }}{% endif %}
        {%- set call = m.tool_calls[0].function %}<call:{{ call.name }}>
        {{- call.arguments | tojson }}
    {%- else %}<{{ m.role }}>{{ m.content }}
    {%- endif %}
{%- endfor %}"""

DEEPSEEK_V31 = """
{%- for m in messages %}
    {%- if m.role == "assistant" and m.tool_calls %}
        {%- for call in m.tool_calls %}
            {%- if loop.first and m.content is not none %}{{ "<say>" + m.content }}{% endif %}
            {{- "<call>" + call.function.name + "<sep>" + call.function.arguments }}
        {%- endfor %}
    {%- else %}{{ "<" + m.role + ">" + m.content }}
    {%- endif %}
{%- endfor %}"""

DEEPSEEK_R1 = """
{%- for m in messages %}
    {%- if m.role == "assistant" and m.content is none %}
        {%- for call in m.tool_calls %}
            {{- "<call>" + call.function.name + "<sep>" + call.function.arguments }}
        {%- endfor %}
    {%- endif %}
    {%- if m.content is not none %}{{ "<" + m.role + ">" + m.content }}{% endif %}
{%- endfor %}"""

QWEN = """
{%- for m in messages %}<{{ m.role }}>
    {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
    {%- for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}
{%- endfor %}"""

QWEN_CODER = """
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
    {%- for call in m.tool_calls or [] %}<call:{{ call.function.name }}>
        {%- for name, value in call.function.arguments | items %}<{{ name }}>{{ value }}{% endfor %}
    {%- endfor %}
{%- endfor %}"""

GLM = QWEN_CODER.replace("call.function.arguments | items", "call.function.arguments.items()")

WITHOUT_TEXTS = QWEN_CODER.replace(
    "call.function.arguments | items",
    "(call.function.arguments if call.function.arguments is mapping else {}) | items",
)

IDS = """
{%- for m in messages %}<{{ m.role }}{{ m.tool_call_id }}>{{ m.content }}
    {%- for call in m.tool_calls or [] %}<call{{ call.id }}>{{ call.function.arguments }}
    {%- endfor %}
{%- endfor %}"""

MISTRAL = (
    """
{%- for m in messages %}
    {%- for call in m.tool_calls or [] if call.id | length != 9 %}
        {{- raise_exception("ids have nine characters") }}
    {%- endfor %}
    {%- if m.tool_call_id and m.tool_call_id | length != 9 %}
        {{- raise_exception("ids have nine characters") }}
    {%- endif %}
{%- endfor %}"""
    + IDS
)


def call(number: int) -> dict[str, Any]:
    function = {"name": f"f{number}", "arguments": {"a": number}}
    return {"id": f"id000000{number}", "type": "function", "function": function}


def calling(*numbers: int, content: str = "", **fields: Any) -> dict[str, Any]:
    calls = [call(number) for number in numbers]
    return {"role": "assistant", "content": content, **fields, "tool_calls": calls}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"id000000{number}", "content": f"r{number}"}


def rendered(directory: Path, template: str, *messages: dict[str, Any]) -> str:
    path = directory / "template.jinja"
    path.write_text(template, encoding="utf-8")
    return load_tokenizer("hdserve-tiny", chat_template=path).render_chat(messages, {})


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_what_was_thought_and_said_before_a_call_is_both_shown(tmp_path: Path, name: str) -> None:
    """To gpt-oss as its template has it, which would refuse the conversation for ever; what was
    thought and said without a call stays as it is."""
    said = calling(1, content="Wait.", **{name: "Hm."})
    text = rendered(tmp_path, GPT_OSS, USER, said, result(1))
    assert text == '<user>hi<analysis>Hm.\nWait.<call:f1>{"a": 1}<f1>r1'
    answer = {"role": "assistant", "content": "So.", name: "Hm."}
    assert rendered(tmp_path, GPT_OSS, USER, answer, calling(1)).startswith(
        "<user>hi<assistant>So.<call:f1>"
    )


@pytest.mark.parametrize("fields", [{"content": "Wait."}, {"thinking": "Wait."}])
def test_one_of_both_is_shown_as_it_is(tmp_path: Path, fields: dict[str, str]) -> None:
    text = rendered(tmp_path, GPT_OSS, USER, calling(1, **fields))
    assert text == '<user>hi<analysis>Wait.<call:f1>{"a": 1}'


def test_templates_that_show_both_are_given_both(tmp_path: Path) -> None:
    said = calling(1, content="Wait.", reasoning_content="Hm.")
    text = rendered(tmp_path, QWEN, USER, said, result(1))
    shown = '<think>Hm.</think>Wait.<call>{"name": "f1", "arguments": {"a": 1}}'
    assert text == f"<user>hi<assistant>{shown}<tool>r1"


def test_what_was_thought_may_be_no_text(tmp_path: Path) -> None:
    """A field of the template's own: then it says what it does not take."""
    with pytest.raises(InvalidRequest, match="refuses these messages: not both"):
        rendered(tmp_path, GPT_OSS, USER, calling(1, content="Wait.", thinking=["Hm."]))


@pytest.mark.parametrize(("template", "silence"), [(DEEPSEEK_V31, "<say>"), (DEEPSEEK_R1, "")])
def test_arguments_are_texts_where_a_template_takes_texts(
    tmp_path: Path, template: str, silence: str
) -> None:
    """As DeepSeek's do, of which R1's shows calls only beside a content that is none."""
    other = calling(2)
    other["tool_calls"][0]["function"]["arguments"] = {"ort": "Köln", "n": [1, None]}
    text = rendered(tmp_path, template, USER, calling(1), result(1), other)
    assert text == (
        f'<user>hi{silence}<call>f1<sep>{{"a": 1}}<tool>r1'
        f'{silence}<call>f2<sep>{{"ort": "Köln", "n": [1, null]}}'
    )


@pytest.mark.parametrize("template", [DEEPSEEK_V31, DEEPSEEK_R1])
def test_arguments_that_were_cut_off_stay_as_they_are(tmp_path: Path, template: str) -> None:
    cut = calling(1)
    cut["tool_calls"][0]["function"]["arguments"] = '{"a'
    assert rendered(tmp_path, template, USER, cut).endswith('<call>f1<sep>{"a')


@pytest.mark.parametrize("template", [QWEN_CODER, GLM, WITHOUT_TEXTS])
def test_arguments_that_were_cut_off_are_shown_where_a_template_takes_objects(
    tmp_path: Path, template: str
) -> None:
    """It goes through them: a text would be refused for ever, or dropped."""
    cut = calling(1)
    cut["tool_calls"][0]["function"]["arguments"] = '{"a'
    text = rendered(tmp_path, template, USER, calling(2), result(2), cut, result(1))
    shown = '<call:f2><a>2<tool>r2<assistant><call:f1><INVALID_JSON>{"a<tool>r1'
    assert text == f"<user>hi<assistant>{shown}"


@pytest.mark.parametrize("template", [QWEN, LLAMA])
def test_arguments_that_were_cut_off_are_a_text_where_a_template_shows_it(
    tmp_path: Path, template: str
) -> None:
    cut = calling(1)
    cut["tool_calls"][0]["function"]["arguments"] = "[1"
    assert '"[1"' in rendered(tmp_path, template, USER, cut)


@pytest.mark.parametrize(
    ("template", "said"), [(DEEPSEEK_V31, "<say>"), (DEEPSEEK_R1, "<assistant>")]
)
def test_what_was_said_before_a_call_is_not_lost(tmp_path: Path, template: str, said: str) -> None:
    """Where a content hides calls it is a message before theirs."""
    saying = calling(1, content="Wait.", reasoning_content="Hm.")
    text = rendered(tmp_path, template, USER, saying, result(1))
    assert text == f'<user>hi{said}Wait.<call>f1<sep>{{"a": 1}}<tool>r1'


@pytest.mark.parametrize(
    ("template", "said", "names"),
    [(LLAMA, "", ("tool", "tool")), (GPT_OSS, "<analysis>Wait.", ("f1", "f2"))],
)
def test_calls_are_shown_one_by_one_where_a_template_takes_one(
    tmp_path: Path, template: str, said: str, names: tuple[str, str]
) -> None:
    """Llama's would refuse two for ever, gpt-oss' show the first, and both results as its own."""
    messages = (USER, calling(1, 2, content="Wait."), result(1), result(2), USER)
    text = rendered(tmp_path, template, *messages)
    one, other = names
    assert text == (
        f'<user>hi{said}<call:f1>{{"a": 1}}<{one}>r1<call:f2>{{"a": 2}}<{other}>r2<user>hi'
    )


@pytest.mark.parametrize("template", [QWEN, DEEPSEEK_V31])
def test_several_calls_stay_together_where_they_can(tmp_path: Path, template: str) -> None:
    text = rendered(tmp_path, template, USER, calling(1, 2), result(1), result(2))
    assert text.count("<call>") == 2
    assert text.endswith("<tool>r1<tool>r2")


@pytest.mark.parametrize("template", [QWEN, DEEPSEEK_V31])
def test_results_are_in_the_order_of_their_calls(tmp_path: Path, template: str) -> None:
    """Tools are done in any order, and most templates show no ids."""
    other = [calling(3, 4), result(4), result(3), USER]
    text = rendered(tmp_path, template, USER, calling(1, 2), result(2), result(1), *other)
    assert re.findall(r"<tool>(r\d)", text) == ["r1", "r2", "r3", "r4"]
    assert text.endswith("<tool>r3<tool>r4<user>hi")


@pytest.mark.parametrize("numbers", [(2, 5), (2, 1, 5), (5, 1)])
def test_results_of_unknown_calls_keep_all_in_their_order(
    tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    text = rendered(tmp_path, QWEN, USER, calling(1, 2), *map(result, numbers))
    assert text.endswith("".join(f"<tool>r{number}" for number in numbers))


OF_OTHERS = ["call_0123456789abcdef01234567", "toolu_01A09q90qw90lq917835lq9", "1", "ids\udc00"]


def with_ids(*ids: str) -> list[dict[str, Any]]:
    """Return a conversation with calls of these ids, and their results."""
    calls = [{**call(number), "id": call_id} for number, call_id in enumerate(ids)]
    results = [{"role": "tool", "tool_call_id": name, "content": name[:1]} for name in ids]
    return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def test_ids_are_short_where_a_template_takes_no_others(tmp_path: Path) -> None:
    """Mistral's would refuse what began with another model for ever; its own ids stay."""
    text = rendered(tmp_path, MISTRAL, *with_ids("Ab3dE6gH9", *OF_OTHERS))
    called = re.findall(r"<call(\w{9})>", text)
    assert called == re.findall(r"<tool(\w{9})>", text)
    assert called[0] == "Ab3dE6gH9"
    assert len({*called}) == 1 + len(OF_OTHERS)
    assert text == rendered(tmp_path, MISTRAL, *with_ids("Ab3dE6gH9", *OF_OTHERS))


def test_ids_stay_as_they_are_where_a_template_takes_them(tmp_path: Path) -> None:
    text = rendered(tmp_path, IDS, *with_ids(*OF_OTHERS))
    assert all(f"<call{name}>" in text and f"<tool{name}>" in text for name in OF_OTHERS)


def test_a_call_may_have_no_id() -> None:
    """A template that needs one says so."""
    messages = [{"role": "assistant", "tool_calls": [{"function": call(1)["function"]}]}]
    assert CallForm(has_short_ids=True).of(messages) == messages


def test_the_variables_of_a_template_are_the_same_in_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    variables = "{{ eos_token }} {{ tools | length }} {{ own }} {{ add_generation_prompt }}"
    messages = [USER, calling(1), result(1), {"role": "assistant", "content": "So"}]
    for template in (DEEPSEEK_R1, QWEN):
        path.write_text(variables + template, encoding="utf-8")
        tokenizer = load_tokenizer("hdserve-tiny", chat_template=path)
        for end, is_before_answer in (
            (ChatEnd.BEFORE_ANSWER, True),
            (ChatEnd.IN_LAST_MESSAGE, False),
        ):
            text = tokenizer.render_chat(messages, {"own": "x"}, [TOOL], end)
            assert text.startswith(f"<|im_end|> 1 x {is_before_answer}<user>hi")
            assert text.endswith("<tool>r1<assistant>So")


def test_other_messages_keep_their_form() -> None:
    form = CallForm(*[True] * len(CallForm._fields))
    messages = [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}, result(1)]
    assert form.of(messages) == messages
    assert CallForm().of([calling(1, 2, content="a", thinking="b")]) == [
        calling(1, 2, content="a", thinking="b")
    ]

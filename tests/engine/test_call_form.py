"""Conversations with calls of tools go on with templates that take them in one way only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdserve.engine.call_form import CallForm
from hdserve.engine.tokenizer import load_tokenizer
from hdserve.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}

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

QWEN = """
{%- for m in messages %}<{{ m.role }}>
    {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
    {%- for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}
{%- endfor %}"""


def call(number: int) -> dict[str, Any]:
    function = {"name": f"f{number}", "arguments": {"a": number}}
    return {"id": f"id{number}", "type": "function", "function": function}


def calling(*numbers: int, content: str = "", **fields: Any) -> dict[str, Any]:
    calls = [call(number) for number in numbers]
    return {"role": "assistant", "content": content, **fields, "tool_calls": calls}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"id{number}", "content": f"r{number}"}


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


def test_other_messages_keep_their_form() -> None:
    form = CallForm(joins_reasoning=True)
    messages = [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}, result(1)]
    assert form.of(messages) == messages
    assert CallForm().of([calling(1, 2, content="a", thinking="b")]) == [
        calling(1, 2, content="a", thinking="b")
    ]

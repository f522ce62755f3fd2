"""What is said is shown by templates that take it as a list of parts only, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdserve.conversation import ChatEnd
from hdserve.engine.tokenization.tokenizer import Tokenizer, load_tokenizer
from hdserve.errors import InvalidRequest

PARTS = "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
ARGUMENTS = "{{ c.function.arguments.values() | list }}"
CALLS = "{% for c in m.tool_calls or [] %}<call>" + ARGUMENTS + "{% endfor %}"

DROPPING = "{% for m in messages %}<{{ m.role }}>" + PARTS + CALLS + "{% endfor %}"
"""Texts, as that of Llama Guard 3 1B does."""

REFUSING = DROPPING.replace(
    PARTS, "{% if m.content is string %}{{ raise_exception('no texts') }}{% endif %}" + PARTS
)
WITH_TOOLS = "{% if tools %}<tools>" + DROPPING + "{% else %}" + REFUSING + "{% endif %}"

FIRST_ONLY = "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>"
DROPPING_LATER = FIRST_ONLY + PARTS + "{% endif %}{% endfor %}"

TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}"
NEITHER = "{% for m in messages %}<{{ m.role }}>{{ m.content.a }}{% endfor %}"

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "Yes"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def tokenizer_with(directory: Path, template: str) -> Tokenizer:
    path = directory / "template.jinja"
    path.write_text(template, encoding="utf-8")
    return load_tokenizer("hdserve-tiny", chat_template=path)


@pytest.mark.parametrize("template", [DROPPING, REFUSING, WITH_TOOLS])
@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([USER], "<user>hello"),
        ([SYSTEM, USER], "<system>Be brief.<user>hello"),
        ([USER, ANSWER, USER], "<user>hello<assistant>Yes<user>hello"),
    ],
)
def test_texts_are_shown_as_parts(
    tmp_path: Path, template: str, messages: list[Any], text: str
) -> None:
    assert tokenizer_with(tmp_path, template).render_chat(messages, {}) == text


def test_a_template_with_tools_is_asked_with_some(tmp_path: Path) -> None:
    """Calls and results are shown as well."""
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    text = tokenizer_with(tmp_path, WITH_TOOLS).render_chat([USER, called, result], {}, [TOOL])
    assert text == "<tools><user>hello<assistant><call>[1]<tool>42"


def test_other_forms_are_found_out_in_parts(tmp_path: Path) -> None:
    """Such as that of system messages, which this template would drop but for the first."""
    tokenizer = tokenizer_with(tmp_path, DROPPING_LATER)
    text = tokenizer.render_chat([SYSTEM, {**SYSTEM, "role": "developer"}, USER], {})
    assert text == "<system>Be brief.\n\nBe brief.<user>hello"


def test_a_part_is_continued(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, DROPPING + "<end>")
    text = tokenizer.render_chat([USER, ANSWER], {}, end=ChatEnd.IN_LAST_MESSAGE)
    assert text == "<user>hello<assistant>Yes"


def test_texts_stay_texts_where_a_template_shows_them(tmp_path: Path) -> None:
    """In capital letters, too."""
    assert tokenizer_with(tmp_path, TEXTS).render_chat([USER], {}) == "<user>HELLO"


def test_a_template_that_takes_neither_gets_texts(tmp_path: Path) -> None:
    assert tokenizer_with(tmp_path, NEITHER).render_chat([USER], {}) == "<user>"
    refusing = NEITHER.replace("{{ m.content.a }}", "{{ raise_exception('nothing') }}")
    with pytest.raises(InvalidRequest, match="refuses these messages: nothing"):
        tokenizer_with(tmp_path, refusing).render_chat([USER], {})

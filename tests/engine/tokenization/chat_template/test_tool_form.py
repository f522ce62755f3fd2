"""Tools without a description or parameters are shown by templates that need them, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdserve.engine.tokenization.tokenizer import Tokenizer, load_tokenizer
from hdserve.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}

GPT_OSS = """
{%- for tool in tools or [] %}{{ "// " + tool.function.description + "\\n" }}
    {{- "type " + tool.function.name + "\\n" }}
{%- endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"""

HERMES = """
{%- for t in tools or [] %}{{ t.function.name }}(
    {%- for n, f in t.function.parameters.properties | items %}{{ n }}{% endfor %}{{ ")" }}
{%- endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"""

QWEN = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"""

DEMANDING = QWEN.replace(
    "{{ tool |", "{{ tool.function.description or raise_exception('describe it') }}{{ tool |"
)


def tool(name: str, **fields: Any) -> dict[str, Any]:
    function = {"name": name, **fields, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


def tokenizer_with(directory: Path, template: str) -> Tokenizer:
    path = directory / "template.jinja"
    path.write_text(template, encoding="utf-8")
    return load_tokenizer("hdserve-tiny", chat_template=path)


def test_a_description_is_empty_where_a_template_needs_one(tmp_path: Path) -> None:
    """gpt-oss' would refuse the tool; others keep theirs."""
    tokenizer = tokenizer_with(tmp_path, GPT_OSS)
    tools = [tool("f"), tool("g", description="Go."), tool("h", description=None)]
    shown = "// \ntype f\n// Go.\ntype g\n// \ntype h\n"
    assert tokenizer.render_chat([USER], {}, tools) == f"{shown}<user>hi"


@pytest.mark.parametrize("fields", [{"description": "Go."}, {"parameters": None}, {}])
def test_parameters_are_empty_where_a_template_needs_some(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Hermes 3's and the first of Qwen3-Coder would refuse the tool; others keep theirs."""
    bare = {"type": "function", "function": {"name": "f", **fields}}
    whole = tool("g")
    whole["function"]["parameters"]["properties"] = {"a": {"type": "string"}}
    text = tokenizer_with(tmp_path, HERMES).render_chat([USER], {}, [bare, whole])
    assert text == "f()g(a)<user>hi"


@pytest.mark.parametrize("fields", [{}, {"description": None, "parameters": None}])
def test_a_template_may_need_both(tmp_path: Path, fields: dict[str, Any]) -> None:
    bare = {"type": "function", "function": {"name": "f", **fields}}
    text = tokenizer_with(tmp_path, GPT_OSS + HERMES).render_chat([USER], {}, [bare])
    assert text == "// \ntype f\n<user>hif()<user>hi"


def test_tools_stay_as_they_are_where_a_template_takes_them(tmp_path: Path) -> None:
    text = tokenizer_with(tmp_path, QWEN).render_chat([USER], {}, [tool("f"), {"own": "form"}])
    assert text == (
        '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
        '{"own": "form"}<user>hi'
    )


def test_a_template_may_need_more_than_an_empty_description(tmp_path: Path) -> None:
    """Then it says what it does not take."""
    with pytest.raises(InvalidRequest, match="refuses these messages: describe it"):
        tokenizer_with(tmp_path, DEMANDING).render_chat([USER], {}, [tool("f")])

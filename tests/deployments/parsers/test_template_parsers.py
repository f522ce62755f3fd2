"""What reads the calls of a model is chosen by its chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.parsers.template_parsers import reasoning_parser_of, tool_parser_of
from hdserve.engine.tokenization.tokenizer import load_tokenizer

TEMPLATES = [
    (r"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n</tool_call>", "hermes"),
    ("{{ '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' }}", "hermes"),
    ("<tool_call>\n<function=name>\n<parameter=a>\n1\n</parameter></function>", "qwen3_coder"),
    ("<tool_call>{name}\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "glm"),
    ("<tool_calls><tool_call>{{ name }}<tool_sep><arg_key>a</arg_key></tool_call>", None),
    ("{{ '[TOOL_CALLS] [' }}{{ call.function | tojson }}", "mistral"),
    ("{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}", "mistral_args"),
    ("{{ '<|channel|>commentary json<|message|>' }}", "harmony"),
    ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma"),
    ("{{ '<|python_tag|>' + call.name }}", "llama3_json"),
    ("respond only with <|tool_call|> followed by a JSON list of tools used", "granite"),
    (
        "{{ '<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n' }}",
        "deepseek_v3",
    ),
    ("{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}", "deepseek_v31"),
    ('{"name": function name, "parameters": dictionary of its arguments}', "llama3_json"),
    (r"{\"name\": function name, \"parameters\": dictionary}", "llama3_json"),
    ('{"name": "f", "description": "d", "parameters": {}}', None),
    ("<tool_calls>[]</tool_calls>", None),
    ("{% if tools %}{{ tools | tojson }}{% endif %}", None),
    ("", None),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_the_way_a_template_asks_for_calls(template: str, name: str | None) -> None:
    """As the templates of the families that have one, and of some that nothing reads."""
    assert tool_parser_of(template) == name


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("{{- '<|channel>thought\\n<channel|>' -}}", "gemma"),
        ("{{ '[THINK]' + block.thinking + '[/THINK]' }}", "mistral"),
        ("{{ message.content }}", None),
        ("", None),
    ],
)
def test_the_marks_a_template_has_for_reasoning(template: str, name: str | None) -> None:
    assert reasoning_parser_of(template) == name


def test_templates_of_tokenizers() -> None:
    """One that shows no tools asks for no calls."""
    path = Path(__file__).parents[3] / "examples" / "configs" / "tools.jinja"
    with_tools = load_tokenizer("hdserve-tiny", chat_template=path)
    assert tool_parser_of(with_tools.tools_template) == "hermes"
    without = load_tokenizer("hdserve-tiny")
    assert without.tools_template == ""
    assert "<|im_start|>" in without.template

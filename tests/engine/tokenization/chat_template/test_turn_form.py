"""No turn that a client sends is dropped or refused where a template shows it in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdserve.conversation import ChatEnd
from hdserve.engine.tokenization.chat_template.turn_form import TurnForm, may_differ, shown_fields
from hdserve.engine.tokenization.tokenizer import Tokenizer, load_tokenizer
from hdserve.errors import InvalidRequest

GPT_OSS = """
{%- set rest = messages %}
{%- if messages[0].role in ["developer", "system"] %}<developer>{{ messages[0].content }}
    {%- set rest = messages[1:] %}
{%- endif %}
{%- for m in rest %}
    {%- if m.role == "assistant" and m.tool_calls %}<call>{{ m.tool_calls[0].function.arguments }}
    {%- elif m.role in ["assistant", "tool", "user"] %}<{{ m.role }}>{{ m.content }}
    {%- endif %}
{%- endfor %}"""

GEMMA_3 = """
{%- set first, rest = "", messages %}
{%- if messages[0].role == "system" %}
    {%- set first, rest = messages[0].content + "\\n\\n", messages[1:] %}
{%- endif %}
{%- for m in rest %}
    {%- if (m.role == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {{- "<model>" if m.role == "assistant" else "<" + m.role + ">" }}
    {{- (first if loop.first else "") + m.content | trim }}
{%- endfor %}"""

GEMMA_2 = """
{%- if messages[0].role == "system" %}{{ raise_exception("no system") }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {{- "<model>" if m.role == "assistant" else "<" + m.role + ">" }}{{ m.content | trim }}
{%- endfor %}"""

SPOKEN = """
{%- set spoken = namespace(number=0) %}
{%- for m in rest if m.role != "tool" and not m.tool_calls %}
    {%- if (m.role == "user") != (spoken.number % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set spoken.number = spoken.number + 1 %}
{%- endfor %}"""

OTHERS = """
    {%- elif m.tool_calls %}
        {%- for call in m.tool_calls %}<call {{ call.id }}>{{ call.function.arguments }}{% endfor %}
    {%- elif m.role == "assistant" %}<assistant>{{ m.content }}
    {%- elif m.role == "tool" %}<result {{ m.tool_call_id }}>{{ m.content }}
    {%- else %}{{ raise_exception("only user and assistant") }}
    {%- endif %}
{%- endfor %}"""

DEVSTRAL = f"""
{{%- set rest = messages %}}
{{%- if messages[0].role == "system" %}}<system>{{{{ messages[0].content }}}}
    {{%- set rest = messages[1:] %}}
{{%- endif %}}
{{%- if tools %}}<tools>{{% endif %}}{SPOKEN}
{{%- for m in rest %}}
    {{%- if m.role == "user" %}}<user>{{{{ m.content }}}}{OTHERS}"""

NEMO = f"""
{{%- set first, rest = "", messages %}}
{{%- if messages[0].role == "system" %}}
    {{%- set first, rest = messages[0].content + "\\n\\n", messages[1:] %}}
{{%- endif %}}
{{%- if tools %}}<tools>{{% endif %}}{SPOKEN}
{{%- for m in rest %}}
    {{%- if m.role == "user" %}}<user>{{{{ (first if loop.last else "") + m.content }}}}{OTHERS}"""

QWEN_35 = """
{%- if "user" not in messages | map(attribute="role") %}{{ raise_exception("no user") }}{% endif %}
{%- for m in messages %}
    {%- if m.role == "system" and not loop.first %}
        {{- raise_exception("System message must be at the beginning") }}
    {%- endif %}<{{ m.role }}>{{ m.content }}
{%- endfor %}"""

DEEPSEEK_R1 = """
{%- set system = namespace(text="") %}
{%- for m in messages if m.role == "system" %}{% set system.text = m.content %}{% endfor %}
{{- system.text }}
{%- for m in messages if m.role != "system" %}<{{ m.role }}>{{ m.content }}{% endfor %}"""

ALL_SHOWN = """
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
    {%- for call in m.tool_calls or [] %}<call>{{ call.function.arguments }}{% endfor %}
{%- endfor %}"""

TEMPLATES = {
    "gpt-oss": GPT_OSS,
    "gemma-3": GEMMA_3,
    "gemma-2": GEMMA_2,
    "devstral": DEVSTRAL,
    "nemo": NEMO,
    "qwen-3.5": QWEN_35,
    "deepseek-r1": DEEPSEEK_R1,
    "all-shown": ALL_SHOWN,
}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

LETTER = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}


def said(*texts: str, **fields: Any) -> list[dict[str, Any]]:
    """Return messages, whose texts' first letters are those of their roles."""
    return [{"role": LETTER[text[0]], "content": text, **fields} for text in texts]


def calling(*ids: str) -> list[dict[str, Any]]:
    """Return a message with calls, and their results."""
    function = {"name": "f", "arguments": {}}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    results = [{"role": "tool", "tool_call_id": call_id, "content": "r"} for call_id in ids]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def tokenizer_with(directory: Path, template: str) -> Tokenizer:
    path = directory / "template.jinja"
    path.write_text(template, encoding="utf-8")
    return load_tokenizer("hdserve-tiny", chat_template=path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-oss", "<developer>s1\n\nd2<user>u3<user>u4"),
        ("gemma-3", "<user>s1\n\nd2\n\nu3\n\nu4"),
        ("gemma-2", "<user>s1\n\nd2\n\nu3\n\nu4"),
        ("devstral", "<system>s1\n\nd2<user>u3\n\nu4"),
        ("nemo", "<user>s1\n\nd2\n\nu3\n\nu4"),
        ("qwen-3.5", "<system>s1\n\nd2<user>u3<user>u4"),
        ("deepseek-r1", "s1\n\nd2<user>u3<user>u4"),
        ("all-shown", "<system>s1<system>d2<user>u3<user>u4"),
    ],
)
def test_the_first_turn_of_codex(tmp_path: Path, name: str, text: str) -> None:
    """Its instructions, what the developer says, and several messages of the user."""
    tokenizer = tokenizer_with(tmp_path, TEMPLATES[name])
    assert tokenizer.render_chat(said("s1", "d2", "u3", "u4"), {}) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-oss", "<developer>s1<user>u2<assistant>a3<user>s4<user>u5<user>d6"),
        ("gemma-3", "<user>s1\n\nu2<model>a3<user>s4\n\nu5\n\nd6"),
        ("gemma-2", "<user>s1\n\nu2<model>a3<user>s4\n\nu5\n\nd6"),
        ("devstral", "<system>s1<user>u2<assistant>a3<user>s4\n\nu5\n\nd6"),
        ("nemo", "<user>u2<assistant>a3<user>s1\n\ns4\n\nu5\n\nd6"),
        ("qwen-3.5", "<system>s1<user>u2<assistant>a3<user>s4<user>u5<user>d6"),
        ("deepseek-r1", "s1<user>u2<assistant>a3<user>s4<user>u5<user>d6"),
        ("all-shown", "<system>s1<user>u2<assistant>a3<system>s4<user>u5<system>d6"),
    ],
)
def test_system_messages_that_come_later(tmp_path: Path, name: str, text: str) -> None:
    """In between, or at the end, as supervisors of agents have them."""
    tokenizer = tokenizer_with(tmp_path, TEMPLATES[name])
    assert tokenizer.render_chat(said("s1", "u2", "a3", "s4", "u5", "d6"), {}) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-oss", "<developer>s1"),
        ("gemma-3", "<user>s1"),
        ("gemma-2", "<user>s1"),
        ("devstral", "<system>s1"),
        ("nemo", "<user>s1"),
        ("qwen-3.5", "<user>s1"),
        ("deepseek-r1", "s1"),
        ("all-shown", "<system>s1"),
    ],
)
def test_a_system_message_alone(tmp_path: Path, name: str, text: str) -> None:
    """All that frameworks send that have a prompt only."""
    assert tokenizer_with(tmp_path, TEMPLATES[name]).render_chat(said("s1"), {}) == text


@pytest.mark.parametrize(
    ("texts", "text"),
    [
        (("s1", "s2", "d3"), "<system>s1\n\ns2<user>d3"),
        (("s1", "d2", "a3"), "<system>s1<user>d2<assistant>a3"),
        (("s1", "a2", "d3"), "<system>s1<assistant>a2<user>d3"),
        (("s1", "a2", "u3"), "<system>s1<assistant>a2<user>u3"),
    ],
)
def test_no_more_than_one_message_becomes_the_missing_user(
    tmp_path: Path, texts: tuple[str, ...], text: str
) -> None:
    """None, if one that comes later is the user's."""
    assert tokenizer_with(tmp_path, QWEN_35).render_chat(said(*texts), {}) == text


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"nemo"}))
def test_a_conversation_that_goes_on_keeps_its_beginning(tmp_path: Path, name: str) -> None:
    """So that its prompt is in the prefix cache."""
    tokenizer = tokenizer_with(tmp_path, TEMPLATES[name])
    messages = said("s1", "d2", "u3", "u4", "a5", "s6", "u7", "a8", "u9", "d10", "a11", "a12")
    whole = tokenizer.render_chat(messages, {}, end=ChatEnd.AFTER_LAST_MESSAGE)
    for num, message in enumerate(messages, 1):
        if message["role"] == "assistant":
            text = tokenizer.render_chat(messages[:num], {}, end=ChatEnd.AFTER_LAST_MESSAGE)
            assert whole.startswith(text)


def test_a_system_message_that_is_shown_in_chats_without_tools_alone(tmp_path: Path) -> None:
    """Mistral Nemo's template shows it in a last message of the user: of a conversation that ends
    with a result it is in the first."""
    tokenizer = tokenizer_with(tmp_path, NEMO)
    chat = said("s1", "u2", "a3", "u4")
    assert tokenizer.render_chat(chat, {}) == "<user>u2<assistant>a3<user>s1\n\nu4"
    messages = [*said("s1", "u2"), *calling("call00001")]
    text = "<tools><user>s1\n\nu2<call call00001>{}<result call00001>r"
    assert tokenizer.render_chat(messages, {}, [TOOL]) == text


@pytest.mark.parametrize("name", ["devstral", "nemo"])
@pytest.mark.parametrize("texts", [("u3",), ("s3",), ("u3", "s4"), ("s3", "d4", "u5")])
def test_what_is_said_behind_results_is_the_end_of_the_last(
    tmp_path: Path, name: str, texts: tuple[str, ...]
) -> None:
    """Mistral's templates count neither calls nor results, so two users would be neighbours."""
    tokenizer = tokenizer_with(tmp_path, TEMPLATES[name])
    calls = calling("call00001", "call00002")
    messages = [*said("u1"), *calls, *said(*texts), *calling("call00003"), *said("a8", "u9")]
    text = "\n\n".join(("r", *texts))
    assert tokenizer.render_chat(messages, {}, [TOOL]) == (
        "<tools><user>u1<call call00001>{}<call call00002>{}"
        f"<result call00001>r<result call00002>{text}"
        "<call call00003>{}<result call00003>r<assistant>a8<user>u9"
    )


@pytest.mark.parametrize("name", ["gpt-oss", "all-shown"])
def test_what_is_said_behind_results_stays_there(tmp_path: Path, name: str) -> None:
    """Where a template shows it."""
    tokenizer = tokenizer_with(tmp_path, TEMPLATES[name])
    messages = [*said("u1"), *calling("call00001"), *said("u2")]
    assert tokenizer.render_chat(messages, {}).endswith("<tool>r<user>u2")


def test_the_assistant_says_two_things_in_a_row(tmp_path: Path) -> None:
    """As one, and the second goes on where the client asks for it."""
    tokenizer = tokenizer_with(tmp_path, GEMMA_3)
    messages = said("u1", "a2", "a3")
    assert tokenizer.render_chat(messages, {}) == "<user>u1<model>a2\n\na3"
    text = tokenizer.render_chat(messages, {}, end=ChatEnd.IN_LAST_MESSAGE)
    assert text == "<user>u1<model>a2\n\na3"


NAMED = GEMMA_3.replace("{{- (first if", "{{- m.name if m.name and m.content }}{{- (first if")


def test_messages_that_cannot_be_one_are_refused(tmp_path: Path) -> None:
    """Those of two persons whose names the template shows."""
    tokenizer = tokenizer_with(tmp_path, NAMED)
    messages = [*said("u1", name="ann"), *said("u2", name="bob")]
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tokenizer.render_chat(messages, {})
    messages = [*said("u1", name="ann", id="1"), *said("u2", name="ann", id="2")]
    assert tokenizer.render_chat(messages, {}) == "<user>annu1\n\nu2"


@pytest.mark.parametrize("name", ["gemma-3", "gemma-2", "devstral", "nemo"])
def test_fields_that_are_not_shown_separate_nothing(tmp_path: Path, name: str) -> None:
    """Frameworks of agents name who speaks, beside a system message without a name."""
    tokenizer = tokenizer_with(tmp_path, TEMPLATES[name])
    messages = [
        *said("s1"),
        *said("u2", name="ann", id=["1"]),
        *said("u3", name="bob"),
        *said("a4", name="assistant"),
        *said("a5"),
        *said("u6", mood="odd"),
    ]
    plain = said("s1", "u2", "u3", "a4", "a5", "u6")
    assert tokenizer.render_chat(messages, {}) == tokenizer.render_chat(plain, {})


def test_fields_of_messages_that_a_template_refuses_may_be_shown() -> None:
    def refuse(*_: object) -> str:
        raise ValueError

    assert shown_fields(refuse, said("u1", name="ann", mood="odd")) == {"name", "mood"}

    def change(_: object, messages: Any) -> str:
        return " ".join(f"{m.get('name', '').upper()}: {'!' * ('mood' in m)}" for m in messages)

    assert shown_fields(change, said("u1", name="ann", id=5)) == {"name"}
    assert shown_fields(change, said("u1", mood="odd", id=5)) == {"mood", "id"}
    assert shown_fields(refuse, said("u1", "a2")) == set()


def test_calls_and_results_are_no_texts() -> None:
    """They stay as they are, and so does what stands between them."""
    form = TurnForm(*[True] * len(TurnForm._fields))
    messages = [*said("u1", "a2"), *calling("1", "2"), *calling("3"), *said("a3", "u4")]
    assert form.of(messages) == messages
    called, result = calling("1")
    for twice in ([called, called], [result, result], [*said("a1"), called, *said("a2")]):
        assert form.of(twice) == twice
    assert form.of([]) == []


def test_what_was_thought_is_joined_as_what_was_said() -> None:
    form = TurnForm(joins_neighbours=True)
    messages = [
        *said("a1", reasoning_content="b"),
        *said("a2"),
        {"role": "assistant", "reasoning_content": "c"},
    ]
    assert form.of(messages) == said("a1\n\na2", reasoning_content="b\n\nc")
    odd = [*said("a1", thinking=["b"]), *said("a2", thinking=["b"])]
    assert form.of(odd) == odd


def test_templates_are_asked_where_they_differ_only() -> None:
    assert not may_differ([*said("u1", "a2", "u3"), *calling("1")])
    for messages in (said("s1", "u2"), said("u1", "d2"), said("u1", "u2"), said("u1", "a2", "a3")):
        assert may_differ(messages)


@pytest.mark.parametrize("model", ["hdserve-tiny", "hdserve-mini"])
def test_the_bundled_models_show_every_turn_by_itself(model: str) -> None:
    texts = ("s1", "d2", "u3", "u4", "a5", "a6", "s7", "u8", "d9")
    roles = [LETTER[text[0]].replace("developer", "system") for text in texts]
    turns = zip(roles, texts, strict=True)
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    found = load_tokenizer(model).render_chat(said(*texts), {})
    assert found == f"{shown}<|im_start|>assistant\n"

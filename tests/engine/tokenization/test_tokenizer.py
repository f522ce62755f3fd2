"""Tokenizers are told apart by what they do, and chat templates get variables, not code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import ByteFallback, Fuse, Metaspace, Sequence, Strip
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Metaspace as MetaspaceSplit
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hdserve.conversation import ChatEnd
from hdserve.core import SamplingParams
from hdserve.engine.tokenization.detokenizer import Detokenizer
from hdserve.engine.tokenization.tokenizer import Tokenizer, load_tokenizer, read_chat_template
from hdserve.errors import ConfigError, InvalidRequest, Unsupported
from hdserve.models import bundled_model_path

TOKENIZER = load_tokenizer("hdserve-tiny")
USER = {"role": "user", "content": "hi"}


def copy_of(directory: Path, *, swapped: tuple[str, str] | None = None) -> Tokenizer:
    """The bundled tokenizer from another directory, without its chat template; ``swapped`` tokens
    change their ids."""
    source = bundled_model_path("hdserve-tiny")
    assert source is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    if swapped is not None:
        path = directory / "tokenizer.json"
        data = json.loads(path.read_text())
        vocab = data["model"]["vocab"]
        one, other = swapped
        vocab[one], vocab[other] = vocab[other], vocab[one]
        path.write_text(json.dumps(data))
    return load_tokenizer(str(directory))


@given(st.text(max_size=40))
def test_decoding_is_the_inverse_of_encoding(text: str) -> None:
    """Any text survives, but for what the tokenizer's own normaliser makes of it."""
    once = TOKENIZER.decode(TOKENIZER.encode(text))
    assert TOKENIZER.decode(TOKENIZER.encode(once)) == once


@pytest.mark.parametrize(
    ("tokens", "blank"),
    [
        ({}, "<|im_end|>"),
        ({"bos_token": "<|im_start|>"}, "<|im_start|>"),
        ({"eos_token": None}, None),
    ],
)
def test_the_token_that_stands_for_no_text(
    tmp_path: Path, tokens: dict[str, str | None], blank: str | None
) -> None:
    copy_of(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | tokens))
    found = load_tokenizer(str(tmp_path)).blank_token_id
    assert found == (None if blank is None else TOKENIZER.encode(blank)[0])


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    """A copy is the same tokenizer; one whose ids differ is not."""
    same, other = tmp_path / "same", tmp_path / "other"
    same.mkdir()
    other.mkdir()
    assert copy_of(same).fingerprint == TOKENIZER.fingerprint
    changed = copy_of(other, swapped=("a", "b"))
    assert changed.encode("a") != TOKENIZER.encode("a")
    assert changed.fingerprint != TOKENIZER.fingerprint


def test_what_a_training_cut_its_texts_to_is_forgotten(tmp_path: Path) -> None:
    """Truncation and padding are saved with a tokenizer that was called with them."""
    trained = AutoTokenizer.from_pretrained(bundled_model_path("hdserve-tiny"))
    trained.pad_token = trained.eos_token
    trained(["a b c d e f", "x"], truncation=True, max_length=4, padding=True)
    trained.save_pretrained(tmp_path)
    assert '"max_length": 4' in (tmp_path / "tokenizer.json").read_text()
    tokenizer, texts = load_tokenizer(str(tmp_path)), ["one two three four five six", "x"]
    assert tokenizer.encode_batch(texts) == TOKENIZER.encode_batch(texts)
    assert tokenizer.fingerprint == TOKENIZER.fingerprint


def test_a_conversation_ends_where_the_assistant_speaks() -> None:
    """The template is rendered up to the assistant's turn, its markers as special tokens."""
    ids = TOKENIZER.encode_chat([USER], {})
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(ids) == text
    assert ids == TOKENIZER.encode(text, adds_special_tokens=False)


@pytest.mark.parametrize(
    ("end", "ending"),
    [
        (ChatEnd.BEFORE_ANSWER, "<|im_end|>\n<|im_start|>assistant\n"),
        (ChatEnd.IN_LAST_MESSAGE, ""),
        (ChatEnd.AFTER_LAST_MESSAGE, "<|im_end|>\n"),
    ],
)
@pytest.mark.parametrize("content", ["So", "So ", " \nSo\n\n"])
def test_a_conversation_ends_where_it_is_told_to(end: ChatEnd, ending: str, content: str) -> None:
    """A message that is continued keeps the white space that it ends with."""
    messages = [USER, {"role": "assistant", "content": content}]
    text = TOKENIZER.render_chat(messages, {}, (), end)
    beginning = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"{beginning}{content}{ending}"
    assert TOKENIZER.encode_chat(messages, {}, (), end) == TOKENIZER.encode(
        text, adds_special_tokens=False
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({}, "no text to continue"),
        ({"content": " \n"}, "no text to continue"),
        ({"content": "So", "tool_calls": [{"id": "1"}]}, "calls tools cannot be continued"),
    ],
)
def test_messages_that_cannot_be_continued(message: dict[str, Any], reason: str) -> None:
    messages = [USER, {"role": "assistant", **message}]
    with pytest.raises(InvalidRequest, match=reason) as caught:
        TOKENIZER.render_chat(messages, {}, (), ChatEnd.IN_LAST_MESSAGE)
    assert caught.value.param == "messages"


def test_a_message_that_the_template_does_not_show_cannot_be_continued(tmp_path: Path) -> None:
    hiding = with_template(tmp_path, "{% for m in messages[:1] %}{{ m.content }}{% endfor %}")
    hidden = [USER, {"role": "assistant", "content": "So"}]
    with pytest.raises(InvalidRequest, match="continue_final_message") as caught:
        hiding.render_chat(hidden, {}, (), ChatEnd.IN_LAST_MESSAGE)
    assert caught.value.param == "messages"


def test_tokens_are_written_as_the_vocabulary_has_them() -> None:
    ids = TOKENIZER.encode(" table\n", adds_special_tokens=False)
    assert "".join(TOKENIZER.written(ids)) == "ĠtableĊ"
    assert TOKENIZER.written([TOKENIZER.vocab_size + 5]) == [""]


@pytest.mark.parametrize(
    "name",
    ["chat_template", "messages", "tools", "tokenize", "self", "add_generation_prompt"],
)
def test_template_options_are_variables(name: str) -> None:
    """A client cannot bring its own template, which is code, nor change how one is applied."""
    endless = "{% for i in range(10**9) %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="is not a template variable") as caught:
        TOKENIZER.encode_chat([USER], {name: endless})
    assert caught.value.param == "chat_template_kwargs"


def test_variables_of_the_configuration(tmp_path: Path) -> None:
    """They hold for every chat, each unless the chat sets it, be it to nothing."""
    path = tmp_path / "own.jinja"
    path.write_text("{{ a }} {{ b }} {{ messages[0].content }}")
    tokenizer = load_tokenizer("hdserve-tiny", chat_template=path, variables={"a": 1, "b": 2})
    assert tokenizer.render_chat([USER], {}) == "1 2 hi"
    assert tokenizer.render_chat([USER], {"b": 3}) == "1 3 hi"
    assert tokenizer.render_chat([USER], {"a": None}) == "None 2 hi"
    with pytest.raises(ConfigError, match=r"^defaults\.chat_template_kwargs: tokenize is"):
        load_tokenizer("hdserve-tiny", variables={"a": 1, "tokenize": True})


def test_unused_template_variables_are_harmless() -> None:
    """A variable the template does not know changes nothing."""
    assert TOKENIZER.encode_chat([USER], {"thinking": True}) == TOKENIZER.encode_chat([USER], {})


def with_template(directory: Path, template: str) -> Tokenizer:
    """The bundled tokenizer with another chat template."""
    copy_of(directory)
    (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(directory))


def test_developers_speak_as_the_system(tmp_path: Path) -> None:
    """To a template that does not know them; one that does is given what was sent."""
    developer, system = ({"role": role, "content": "Be brief."} for role in ("developer", "system"))
    assert TOKENIZER.encode_chat([developer, USER], {}) == TOKENIZER.encode_chat([system, USER], {})
    knowing = "{% for m in messages %}{{ 'dev' if m.role == 'developer' else m.role }} {% endfor %}"
    tokenizer = with_template(tmp_path, knowing)
    assert tokenizer.decode(tokenizer.encode_chat([developer, system], {})) == "dev system "


def test_a_template_that_speaks_of_developers_need_not_know_them(tmp_path: Path) -> None:
    speaking = "You help a developer." + EACH + "{{ m.role }} {% endfor %}"
    tokenizer = with_template(tmp_path, speaking)
    developer = {"role": "developer", "content": "Be brief."}
    assert tokenizer.render_chat([developer, USER], {}) == "You help a developer.system user "


CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "42"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

EACH = "{% for m in messages %}"
TEXTS = EACH + "{{ m.content }} {% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.values() | list }}{% endfor %}"
TEXTS_OF_TWO = EACH + "{% if m.role != 'tool' %}{{ m.content }}" + CALLS + "{% endif %}{% endfor %}"
REFUSING = EACH + "{% if m.tool_calls %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
WITH_TOOLS = EACH + "{{ m.content }}{% if tools %}" + CALLS + "{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "tools", "missing"),
    [
        (TEXTS, [USER, CALLING], [], "does not show tool calls"),
        (TEXTS, [USER, CALLING, RESULT], [], "does not show tool calls"),
        (TEXTS, [USER, RESULT], [], None),
        (TEXTS, [USER, CALLING | {"tool_calls": []}], [], None),
        (EACH + "{{ m.content }}" + CALLS + "{% endfor %}", [USER, CALLING, RESULT], [], None),
        (TEXTS_OF_TWO, [USER, CALLING], [], None),
        (TEXTS_OF_TWO, [USER, CALLING, RESULT], [], "does not show tool results"),
        (REFUSING, [USER, CALLING], [], "refuses these messages: no tools"),
        (WITH_TOOLS, [USER, CALLING], [], "does not show tool calls"),
        (WITH_TOOLS, [USER, CALLING], [TOOL], None),
    ],
)
def test_what_a_template_leaves_out_is_refused(
    tmp_path: Path, template: str, messages: list[Any], tools: list[Any], missing: str | None
) -> None:
    """Calls and results of tools are in the prompt, or the request is told that they are not."""
    tokenizer = with_template(tmp_path, template)
    if missing is None:
        assert tokenizer.encode_chat(messages, {}, tools)
        return
    with pytest.raises(InvalidRequest, match=missing) as caught:
        tokenizer.encode_chat(messages, {}, tools)
    assert caught.value.param == "messages"


def test_tools_are_refused_where_the_template_only_shows_those_of_messages(tmp_path: Path) -> None:
    """As that of Phi-4-mini, which has the word nevertheless."""
    shown = "{% if 'tools' in m and m['tools'] is not none %}{{ m['tools'] }}{% endif %}"
    tokenizer = with_template(tmp_path, EACH + "{{ m.content }}" + shown + "{% endfor %}")
    assert tokenizer.render_chat([USER], {})
    with pytest.raises(Unsupported, match="does not know tools") as caught:
        tokenizer.render_chat([USER], {}, [TOOL])
    assert caught.value.param == "tools"


def test_the_template_of_the_example() -> None:
    """It shows tools, calls and results; without them it is the model's own."""
    path = Path(__file__).parents[3] / "examples" / "configs" / "tools.jinja"
    tokenizer = load_tokenizer("hdserve-tiny", chat_template=path)
    ids = tokenizer.encode_chat([USER, CALLING, RESULT], {}, [TOOL])
    text = tokenizer.decode(ids)
    for shown in ('{"name": "f", "parameters": ', '{"name": "f", "arguments": {"a": 1}}', "42"):
        assert shown in text
    assert tokenizer.encode_chat([USER], {}) == TOKENIZER.encode_chat([USER], {})


def test_a_template_is_asked_once(tmp_path: Path) -> None:
    """What it shows is not found out at every request."""
    num_rendered = 0

    class Counting(PreTrainedTokenizerFast):
        def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
            nonlocal num_rendered
            num_rendered += 1
            return super().apply_chat_template(*arguments, **options)

    with_template(tmp_path, TEXTS)
    tokenizer = Tokenizer(Counting.from_pretrained(tmp_path))
    for num_asked, messages in ((1, [USER]), (12, [USER, RESULT])):
        num_rendered = 0
        tokenizer.encode_chat(messages, {})
        assert num_rendered <= num_asked + 1
        num_rendered = 0
        for _ in range(5):
            tokenizer.encode_chat(messages, {})
        assert num_rendered == 5


@pytest.mark.parametrize("messages", [[{"role": "user"}], [{}], [USER, {"content": "x"}]])
def test_what_a_template_refuses_is_a_wrong_request(messages: list[dict[str, Any]]) -> None:
    """Messages that the template cannot render get its reason, not an internal error."""
    with pytest.raises(InvalidRequest, match="chat template refuses") as caught:
        TOKENIZER.encode_chat(messages, {})
    assert caught.value.param == "messages"


def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    """Such a model is served for plain completions, and says so."""
    tokenizer = copy_of(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(Unsupported, match=r"`chat_template` .* use /v1/completions"):
        tokenizer.encode_chat([USER], {})


def test_a_template_of_its_own(tmp_path: Path) -> None:
    """It makes the prompts, and tells whether there are tools; the tokenizer stays the same."""
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages[0].content }}{% if tools %}!{% endif %}?")
    tokenizer = load_tokenizer("hdserve-tiny", chat_template=path)
    assert tokenizer.decode(tokenizer.encode_chat([USER], {})) == "hi?"
    assert tokenizer.decode(tokenizer.encode_chat([USER], {}, [{"type": "function"}])) == "hi!?"
    with pytest.raises(Unsupported, match="does not know tools; `chat_template` of its config"):
        TOKENIZER.encode_chat([USER], {}, [{"type": "function"}])
    assert tokenizer.fingerprint == TOKENIZER.fingerprint


def test_a_byte_order_mark_is_no_part_of_a_template(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages[0].content }}?", encoding="utf-8-sig")
    tokenizer = load_tokenizer("hdserve-tiny", chat_template=path)
    assert tokenizer.render_chat([USER], {}) == "hi?"


def test_a_file_that_is_no_template(tmp_path: Path) -> None:
    """It is an error of the configuration, whether it is missing, no text or no Jinja."""
    path = tmp_path / "own.jinja"
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        read_chat_template(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        read_chat_template(path)
    path.write_text("{% for message in %}")
    with pytest.raises(ConfigError, match="is not a chat template: Expected an expression"):
        load_tokenizer("hdserve-tiny", chat_template=path)


def test_the_text_of_one_token() -> None:
    """Special tokens show, and half a character shows as the replacement character."""
    assert TOKENIZER.token_text(2) == "<|im_end|>"
    assert TOKENIZER.token_text(TOKENIZER.encode("🙂")[0]) == "\ufffd"


def test_text_is_the_same_whole_and_as_it_grows() -> None:
    """Though transformers would take the spaces before punctuation from the whole."""
    vocab = {"<unk>": 0, "do": 1, "n't": 2, "!": 3}
    backend = tokenizers.Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    cleaning = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    tokenizer = Tokenizer(cleaning)
    ids = tokenizer.encode("do n't !")
    detokenizer = Detokenizer(tokenizer.backend, SamplingParams())
    grown = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert tokenizer.decode(ids) == grown == "do n't !"


def test_a_tokenizer_that_nothing_reads_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    """As of a newer format, for which the library raises no class of its own."""
    copy_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "New"}}')
    with pytest.raises(ConfigError, match="cannot load the tokenizer of"):
        load_tokenizer(str(tmp_path))


def test_a_missing_tokenizer_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    """In one line: a directory that is not there, or without a tokenizer."""
    for path, reason in (
        (tmp_path, "it has no tokenizer.json"),
        (tmp_path / "none", "there is no such directory"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_tokenizer(str(path))
        assert caught.value.message == f"cannot load the tokenizer of {str(path)!r}: {reason}"


def test_code_of_a_model_that_needs_a_missing_package_is_an_error_of_the_configuration(
    tmp_path: Path,
) -> None:
    copy_of(tmp_path)
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "configuration_own.py").write_text("import nothing_here\n")
    with pytest.raises(ConfigError, match=r"cannot load the tokenizer of .*nothing_here"):
        load_tokenizer(str(tmp_path), trust_remote_code=True)


def test_a_misspelt_model_is_told_at_once_where_there_is_no_hub(tmp_path: Path) -> None:
    """It is not asked for again and again: nobody answers on port 9."""
    code = "from hdserve import LLM; LLM('tiny')"
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
    environment = {**os.environ, **hub}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "the bundled models are hdserve-mini, hdserve-tiny, and the hub" in done.stderr
    assert "Retrying" not in done.stderr


@given(st.text(max_size=40))
def test_token_bytes_are_those_of_the_text(text: str) -> None:
    """Together the tokens' bytes are the text, wherever a token cuts a character."""
    ids = TOKENIZER.encode(text)
    whole = b"".join(TOKENIZER.token_bytes(token_id) for token_id in ids)
    assert whole.decode() == TOKENIZER.decode(ids)


def test_bytes_of_tokens_that_begin_with_a_space() -> None:
    """A decoder takes SentencePiece's mark of a space from the first token of a text."""
    vocab = {"<unk>": 0, "\u2581Hello": 1, "\u2581world": 2, "\u2581": 3}
    backend = tokenizers.Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = MetaspaceSplit(), Metaspace()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = tokenizer.encode("Hello world")
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b" Hello", b" world"]
    assert tokenizer.token_bytes(3) == b" "


@pytest.mark.parametrize("drops_space", [False, True])
def test_bytes_of_byte_fallback_tokens(drops_space: bool) -> None:
    """``<0xNN>`` is one byte, whatever is decoded of it alone; special tokens are their names."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = Sequence([ByteFallback(), Fuse(), *[Strip(" ", 1, 0)] * drops_space])
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = tokenizer.encode("é")
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b"\xc3", b"\xa9"]
    assert [tokenizer.token_bytes(2 + byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]
    assert tokenizer.token_bytes(1) == b"<s>"

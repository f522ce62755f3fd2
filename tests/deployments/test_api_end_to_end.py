"""Sign-in, namespaces, structured output and tools, as clients of a shared server meet them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest

from hdserve.config import GatewayConfig
from hdserve.databases.append_log import pack_record, take_record
from hdserve.databases.archive import encode_end
from hdserve.databases.messages import Publish
from hdserve.databases.snapshot import DatabaseKey
from hdserve.models import bundled_model_path
from tests.documents import shell_commands
from tests.serving import ServedApplication
from tests.waiting import WAIT_S

pytestmark = pytest.mark.ray

MODEL = "assistant"
QUESTION: list[Any] = [{"role": "user", "content": "I want to book a table for two in San Jose."}]
ADMIN_KEY = "the-key-of-the-administrator"
NEW_KEY = "a-key-that-comes-and-goes"
ANNA_KEY, OTTO_KEY, OTHER_OTTO_KEY = (
    "key-of-anna-0123456",
    "key-of-otto-0123456",
    "otto's-2nd-key-9",
)
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "restaurant": {"type": "string", "maxLength": 20},
        "guests": {"type": "integer", "minimum": 1, "maximum": 12},
        "day": {"enum": ["Monday", "Friday", "Sunday"]},
        "wishes": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["restaurant", "guests", "day", "wishes"],
    "additionalProperties": False,
}
BOOK: Any = {"type": "function", "function": {"name": "book_table", "parameters": SCHEMA}}
CANCEL: Any = {
    "type": "function",
    "function": {
        "name": "cancel",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


def seeds(num: int) -> list[Any]:
    """So many, of which all but the first run with the slow tests."""
    return [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, num))]


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    """One model whose template knows tools, two tenants, an administrator, strict requests."""
    directory = tmp_path_factory.mktemp("serve")
    keys = directory / "keys"
    keys.write_text(f"# tenants\n{ANNA_KEY} anna\n{OTTO_KEY} otto\n\n{OTHER_OTTO_KEY}\totto\n")
    config = {
        "models": [
            {
                "name": MODEL,
                "model": str(_model(directory / "model")),
                "aliases": ["a"],
                "drafting": {"adapts_budget": False},
                "engine": {"dtype": "float32", "exact": True},
            }
        ],
        "gateway": {"strict_requests": True},
        "model_database": {"num_shards": 2},
    }
    admin_key = directory / "admin-key"
    admin_key.write_text(f"{ADMIN_KEY}\n")
    environment = {"HDSERVE_API_KEYS_FILE": str(keys), "HDSERVE_ADMIN_KEY_FILE": str(admin_key)}
    with ServedApplication(directory, config, environment=environment) as served:
        yield served
        answer = served.client(ANNA_KEY).chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, extra_body={"min_tokens": 20}
        )
    log = served.log_path.read_text()
    assert not any(key in log for key in (ADMIN_KEY, ANNA_KEY, OTTO_KEY, NEW_KEY))
    assert not any(text in log for text in (QUESTION[0]["content"], _written(answer)))


@pytest.fixture(scope="module")
def client(application: ServedApplication) -> openai.OpenAI:
    return application.client(ANNA_KEY)


@pytest.fixture(scope="module")
def claude(application: ServedApplication) -> Iterator[anthropic.Anthropic]:
    """The client of the other API, which adds the version to the address itself."""
    base_url = application.base_url
    with anthropic.Anthropic(base_url=base_url, api_key=ANNA_KEY, max_retries=0) as client:
        yield client


def _model(directory: Path) -> Path:
    """The smallest bundled model with a chat template that knows tools."""
    source = bundled_model_path("hdserve-mini")
    assert source is not None
    shutil.copytree(source, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def _written(answer: Any) -> str:
    """The text of an answer, as far as it is in one line."""
    line: str = max(answer.choices[0].message.content.splitlines(), key=len)
    assert len(line) > 10
    return line


def _drafts(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.model_extra["metrics"]["speculative_decoding"]
    return found


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", f"Basic {ANNA_KEY}", "Bearer é"])
def test_a_key_is_needed(application: ServedApplication, authorization: str | None) -> None:
    """Without a right key nothing but the state of the server is told, in OpenAI's shape."""
    headers = {"authorization": authorization.encode()} if authorization else {}
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/no")):
        answer = httpx.request(
            method, f"{application.base_url}{path}", headers=headers, timeout=WAIT_S
        )
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    for path in ("/health", "/ready", "/version", "/openapi.json"):
        answer = httpx.get(f"{application.base_url}{path}", headers=headers, timeout=WAIT_S)
        assert answer.status_code == 200


def test_clients_raise_their_own_error(application: ServedApplication) -> None:
    """The openai client knows what a wrong key is; a right one works by any of its names."""
    with pytest.raises(openai.AuthenticationError) as caught:
        application.client("no-such-key").models.list()
    assert caught.value.code == "invalid_api_key"
    assert [model.id for model in application.client(OTTO_KEY).models.list()] == [MODEL, "a"]


@pytest.fixture
def key_file(application: ServedApplication) -> Iterator[tuple[Path, str]]:
    """Where the keys are, and what they are; they are so again in the end."""
    path = application.log_path.with_name("keys")
    before = path.read_text()
    yield path, before
    path.write_text(before)


def test_keys_change_while_it_runs(
    application: ServedApplication, key_file: tuple[Path, str]
) -> None:
    """A new key is let in, a broken file changes nothing, and a key that is gone is refused."""
    path, before = key_file

    def wait_for(status: int) -> None:
        deadline_s = time.monotonic() + 60
        while answer(NEW_KEY) != status:
            assert time.monotonic() < deadline_s, f"not {status} in a minute"
            time.sleep(0.2)

    def answer(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(
            f"{application.base_url}/v1/models", headers=headers, timeout=WAIT_S
        ).status_code

    assert answer(NEW_KEY) == 401
    for text, status in ((f"{before}{NEW_KEY} new\n", 200), (before, 401)):
        changed = path.with_name("changed")
        changed.write_text(text)
        changed.replace(path)
        wait_for(status)
        assert answer(ANNA_KEY) == answer(ADMIN_KEY) == 200
    path.write_text(before + "short")
    deadline_s = time.monotonic() + 60
    while "the keys stay as they were" not in application.log_path.read_text():
        assert answer(ANNA_KEY) == 200
        assert time.monotonic() < deadline_s, "nothing is said in a minute"
        time.sleep(0.2)


@pytest.mark.parametrize("seed", seeds(3))
def test_structured_output(client: openai.OpenAI, seed: int) -> None:
    """At temperature 1 the answer is what the schema allows, the same with drafts and without,
    streamed and whole."""
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "seed": seed,
        "temperature": 1.0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "booking", "schema": SCHEMA, "strict": True},
        },
    }
    plain = client.chat.completions.create(
        **options, extra_body={"speculation": {"enabled": False}}
    )
    text = plain.choices[0].message.content or ""
    jsonschema.validate(json.loads(text), SCHEMA)
    assert plain.choices[0].finish_reason == "stop"
    drafted = client.chat.completions.create(**options)
    assert drafted.choices[0].message.content == text
    assert _drafts(drafted)["num_draft_tokens"] > 0
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_forms_of_completions(client: openai.OpenAI) -> None:
    """A pattern, a choice and any JSON object, by the names vLLM gives them."""
    options: dict[str, Any] = {"model": MODEL, "prompt": "The answer:", "max_tokens": 40, "seed": 1}
    found = client.completions.create(
        **options, n=3, extra_body={"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}
    )
    assert {choice.text for choice in found.choices} <= {"yes", "no", "perhaps"}
    found = client.completions.create(**options, extra_body={"guided_regex": r"\d{3}-[a-f]+!"})
    assert found.choices[0].text[3] == "-"
    found = client.completions.create(
        **options, extra_body={"response_format": {"type": "json_object"}}
    )
    assert found.choices[0].text.startswith("{")


@pytest.mark.parametrize("seed", seeds(2))
def test_required_tool_calls(client: openai.OpenAI, seed: int) -> None:
    """A call that is required comes, its arguments are what the tool takes, streamed and whole; a
    named function ends with ``stop``, as with the OpenAI API."""
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "seed": seed,
        "temperature": 1.0,
        "tools": [BOOK, CANCEL],
        "tool_choice": {"type": "function", "function": {"name": "book_table"}},
    }
    (choice,) = client.chat.completions.create(**options).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "book_table"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.to_dict() == {"role": "assistant", "content": None}
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    first, *rest = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert first.function is not None
    assert (first.function.name, first.function.arguments) == ("book_table", "")
    assert len(rest) > 1
    pieces = [piece.function.arguments or "" for piece in rest if piece.function]
    assert "".join(pieces) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**options) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [item.function.arguments for item in message.tool_calls or ()] == ["".join(pieces)]
    short = [*client.chat.completions.create(**options | {"max_tokens": 28}, stream=True)]
    whole = client.chat.completions.create(**options | {"max_tokens": 28}).choices[0]
    assert short[-1].choices[0].finish_reason == whole.finish_reason == "length"
    (half,) = whole.message.tool_calls or ()
    found = [call for chunk in short for call in chunk.choices[0].delta.tool_calls or ()]
    cut_off = "".join(item.function.arguments or "" for item in found if item.function)
    assert half.type == "function"
    assert half.function.arguments == cut_off
    assert call.function.arguments.startswith(cut_off)
    options |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
    (choice,) = client.chat.completions.create(**options).choices
    assert len(choice.message.tool_calls or []) == 1
    assert choice.finish_reason in {"tool_calls", "length"}


def test_calls_the_model_chose(client: openai.OpenAI) -> None:
    """With ``auto`` text and call are told apart, and the result of a call can be sent back."""
    tools: Any = [CANCEL]
    wanted = r'Well\. <tool_call>\n\{"name": "cancel", "arguments": \{\}\}\n</tool_call>'
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=tools, extra_body={"guided_regex": wanted}
    )
    message = answer.choices[0].message
    assert message.content == "Well."
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
    history = [*QUESTION, message.model_dump(), result]
    again = client.chat.completions.create(model=MODEL, messages=history, tools=tools, max_tokens=5)
    assert again.usage is not None
    assert answer.usage is not None
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens + 20


@pytest.mark.parametrize("seed", seeds(3))
def test_agents_have_tools_and_a_format(client: openai.OpenAI, seed: int) -> None:
    """An output is a call of a tool or an answer in the format, never text."""
    tools: Any = [BOOK]
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    (choice,) = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "Be brief."}, *QUESTION],
        tools=tools,
        parallel_tool_calls=False,
        response_format=form,
        seed=seed,
        temperature=1.0,
        max_tokens=400,
    ).choices
    written = choice.message.content
    if choice.finish_reason == "tool_calls":
        (call, *_) = choice.message.tool_calls or ()
        assert call.type == "function"
        written = call.function.arguments
    assert choice.finish_reason != "length"
    jsonschema.validate(json.loads(written or ""), SCHEMA)


@pytest.mark.parametrize("seed", seeds(2))
def test_responses(client: openai.OpenAI, seed: int) -> None:
    """The other API gives the text of the chat, streamed and whole, with drafts and without."""
    limit = 25
    chat = client.chat.completions.create(
        model=MODEL, messages=QUESTION, seed=seed, max_tokens=limit, temperature=0.8
    )
    text = chat.choices[0].message.content
    options: dict[str, Any] = {
        "model": MODEL,
        "max_output_tokens": limit,
        "temperature": 0.8,
        "metadata": {"a": "b"},
        "store": False,
    }
    part = {"type": "input_text", "text": QUESTION[0]["content"]}
    for given in (QUESTION[0]["content"], QUESTION, [{"role": "user", "content": [part]}]):
        extra = {"seed": seed, "speculation": {"enabled": isinstance(given, str)}}
        answer = client.responses.create(input=given, **options, extra_body=extra)
        assert answer.output_text == text
    is_cut_off = chat.choices[0].finish_reason == "length"
    assert answer.status == ("incomplete" if is_cut_off else "completed")
    assert (answer.incomplete_details is not None) == is_cut_off
    assert answer.metadata == {"a": "b"}
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    details = answer.usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == answer.usage.input_tokens
    events = [*client.responses.create(input=QUESTION, **options, stream=True, extra_body=extra)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == text
    last = events[-1]
    assert last.type == f"response.{answer.status}"
    assert last.response.output_text == text
    assert last.response.usage.output_tokens == answer.usage.output_tokens


@pytest.mark.parametrize("is_enabled", [True, False])
def test_log_probabilities_of_responses(client: openai.OpenAI, is_enabled: bool) -> None:
    """They are those of a chat, streamed and whole, and their tokens are the text."""
    sampled: dict[str, Any] = {"model": MODEL, "temperature": 0.8}
    chat = client.chat.completions.create(
        **sampled, messages=QUESTION, seed=1, max_tokens=25, logprobs=True, top_logprobs=2
    )
    (choice,) = chat.choices
    assert choice.logprobs is not None
    scored = [token.to_dict() for token in choice.logprobs.content or ()]
    options: dict[str, Any] = {
        **sampled,
        "input": QUESTION,
        "max_output_tokens": 25,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "extra_body": {"seed": 1, "speculation": {"enabled": is_enabled}},
    }
    answer = client.responses.create(**options)
    (message,) = answer.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    found = [token.to_dict() for token in part.logprobs or ()]
    assert found == scored[: len(found)]
    assert len(scored) - len(found) <= 1  # the end token, which is no text
    data = b"".join(bytes(token.bytes) for token in part.logprobs or ())
    assert data.decode(errors="replace") == answer.output_text == choice.message.content
    events = [*client.responses.create(**options, stream=True)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [token for event in deltas for token in event.logprobs]
    assert [(token.token, token.logprob) for token in streamed] == [
        (token["token"], token["logprob"]) for token in found
    ]
    last = events[-1]
    assert last.type == f"response.{answer.status}"
    assert last.response.output[0].to_dict()["content"] == [part.to_dict()]


def test_responses_with_instructions(client: openai.OpenAI) -> None:
    """They count as a message, an answer is a message of the next turn, and it holds a schema."""
    form: Any = {"format": {"type": "json_schema", "name": "booking", "schema": SCHEMA}}
    first = client.responses.create(
        model=MODEL, input=QUESTION, instructions="Be brief.", text=form, temperature=1.0
    )
    jsonschema.validate(json.loads(first.output_text), SCHEMA)
    assert (first.status, first.instructions) == ("completed", "Be brief.")
    history: Any = [*QUESTION, *(item.to_dict() for item in first.output), *QUESTION]
    again = client.responses.create(model=MODEL, input=history, max_output_tokens=3)
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.input_tokens > first.usage.input_tokens + 20


def test_responses_with_tools(client: openai.OpenAI) -> None:
    """A call comes as an item, streamed as it is written, and its output can be sent back."""
    tools: Any = [{"type": "function", **tool["function"]} for tool in (BOOK, CANCEL)]
    options: dict[str, Any] = {
        "model": MODEL,
        "input": QUESTION,
        "tools": tools,
        "tool_choice": {"type": "function", "name": "book_table"},
        "extra_body": {"seed": 1},
    }
    answer = client.responses.create(**options)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("book_table", "completed")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    pieces = []
    with client.responses.stream(**options) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                pieces.append(event.delta)
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert "".join(pieces) == streamed.arguments == call.arguments
    assert len(pieces) > 1
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    history: Any = [*QUESTION, call.to_dict(), output]
    again = client.responses.create(model=MODEL, input=history, tools=tools, max_output_tokens=3)
    assert answer.usage is not None
    assert again.usage is not None
    assert again.usage.input_tokens > answer.usage.input_tokens + 20


NEGATED = {"type": "json_schema", "name": "n", "schema": {"not": {}}, "strict": True}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"text": {"format": NEGATED}}, "unsupported_parameter", "text"),
        ({"extra_body": {"frobnicate": 1}}, "invalid_value", "frobnicate"),
    ],
)
def test_responses_that_are_refused(
    client: openai.OpenAI, is_streamed: bool, fields: dict[str, Any], code: str, param: str
) -> None:
    """With a status before any event, and the parameter by the name it has in this API."""
    options: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 2, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**options, stream=is_streamed)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_a_response_to_what_is_too_long(client: openai.OpenAI) -> None:
    """Has its status, or events that say so: as from OpenAI, by which Codex begins to forget."""
    options: dict[str, Any] = {"model": MODEL, "input": " the" * 50_000}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**options)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    events = client.responses.with_streaming_response.create(**options, stream=True)
    with events as answer:
        lines = [*answer.iter_lines()]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data:")]
    kinds = ["response.created", "response.in_progress", "error", "response.failed"]
    assert [event["type"] for event in data] == kinds
    assert data[-1]["response"]["error"]["code"] == "context_length_exceeded"
    with pytest.raises(openai.APIError) as caught:
        [*client.responses.create(**options, stream=True)]
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("seed", seeds(2))
def test_messages(client: openai.OpenAI, claude: anthropic.Anthropic, seed: int) -> None:
    """Anthropic's API gives the text of the chat, streamed and whole, with drafts and without."""
    chat = client.chat.completions.create(
        model=MODEL, messages=QUESTION, seed=seed, max_tokens=25, temperature=0.8
    )
    text = chat.choices[0].message.content
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 25}
    for is_enabled in (False, True):
        speculation = {"enabled": is_enabled}
        extra = {"seed": seed, "temperature": 0.8, "speculation": speculation}
        message = claude.messages.create(messages=QUESTION, **options, extra_body=extra)
        assert [block.text for block in message.content if block.type == "text"] == [text]
    is_cut_off = chat.choices[0].finish_reason == "length"
    assert message.stop_reason == ("max_tokens" if is_cut_off else "end_turn")
    usage = message.usage
    assert chat.usage is not None
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens == chat.usage.prompt_tokens
    extra["speculation"] = {"enabled": False}  # with drafts it may come at once
    with claude.messages.stream(messages=QUESTION, **options, extra_body=extra) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == text
    assert last.stop_reason == message.stop_reason
    assert last.usage.output_tokens == usage.output_tokens


def test_messages_that_go_on(claude: anthropic.Anthropic) -> None:
    """From the beginning of an answer; a stop sequence ends them, and is told."""
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 30, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(messages=QUESTION, system="Be brief.", **options)
    (block,) = whole.content
    assert block.type == "text"
    begun, found, rest = block.text.partition(" ")
    assert found
    messages: Any = [*QUESTION, {"role": "assistant", "content": begun}]
    gone_on = claude.messages.create(
        messages=messages, system="Be brief.", stop_sequences=[rest[4:8]], **options
    )
    (continued,) = gone_on.content
    assert continued.type == "text"
    assert continued.text == found + rest[: rest.index(rest[4:8])]
    assert (gone_on.stop_reason, gone_on.stop_sequence) == ("stop_sequence", rest[4:8])


def test_messages_with_tools(claude: anthropic.Anthropic) -> None:
    """A call is a block, streamed as it is written, and its result can be sent back."""
    functions = [tool["function"] for tool in (BOOK, CANCEL)]
    tools: Any = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 400,
        "tools": tools,
        "tool_choice": {"type": "tool", "name": "book_table"},
        "extra_body": {"seed": 1},
    }
    message = claude.messages.create(**options)
    (call,) = message.content
    assert call.type == "tool_use"
    assert (call.name, message.stop_reason) == ("book_table", "tool_use")
    jsonschema.validate(call.input, SCHEMA)
    options["extra_body"]["speculation"] = {"enabled": False}  # with drafts it may come at once
    with claude.messages.stream(**options) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == call.input
    assert len(pieces) > 1
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    history: Any = [
        *QUESTION,
        {"role": "assistant", "content": [call.to_dict()]},
        {"role": "user", "content": [result]},
    ]
    again = claude.messages.create(model=MODEL, messages=history, tools=tools, max_tokens=3)
    counted = claude.messages.count_tokens(model=MODEL, messages=history, tools=tools)
    reused = again.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == again.usage.input_tokens + reused
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    held = claude.messages.create(
        model=MODEL, messages=QUESTION, max_tokens=400, output_config=form
    )
    (block,) = held.content
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), SCHEMA)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"extra_body": {"temperature": -1}}, "temperature"),
        (
            {"messages": [{"role": "user", "content": " the" * 50_000}]},
            r"too long: \d+ tokens > \d+ maximum",
        ),
        ({"stop_sequences": ["x" * 1000]}, "256 characters"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
    ],
)
def test_messages_that_are_refused(
    claude: anthropic.Anthropic, is_streamed: bool, fields: dict[str, Any], told: str
) -> None:
    """With a status before any event, and an error in the shape of this API."""
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 2, **fields}
    with pytest.raises(anthropic.BadRequestError, match=told) as caught:
        claude.messages.create(**options, stream=is_streamed)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_errors_before_a_message_is_read(application: ServedApplication) -> None:
    """Have the shape of this API, too; a key may come in its header."""
    url = f"{application.base_url}/v1/messages"
    body = {"model": "no-such-model", "max_tokens": 1, "messages": QUESTION}
    small = json.dumps(body).encode()
    large = small + b" " * GatewayConfig().max_body_bytes
    for headers, sent, status, kind in (
        ({}, small, 401, "authentication_error"),
        ({"x-api-key": "wrong"}, small, 401, "authentication_error"),
        ({"x-api-key": ANNA_KEY}, small, 404, "not_found_error"),
        ({"x-api-key": ANNA_KEY}, large, 413, "request_too_large"),
        ({"x-api-key": ANNA_KEY, "authorization": ""}, small, 404, "not_found_error"),
        ({"x-api-key": ANNA_KEY, "authorization": "Basic eA=="}, small, 404, "not_found_error"),
        ({"x-api-key": ANNA_KEY, "authorization": "Bearer no"}, small, 401, "authentication_error"),
    ):
        answer = httpx.post(url, headers=headers, content=sent, timeout=WAIT_S)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == kind
    answer = httpx.get(url, headers={"x-api-key": ANNA_KEY}, timeout=WAIT_S)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_strict_requests(client: openai.OpenAI) -> None:
    """A field nobody documents is refused by name; a documented one without effect is not."""
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 1}
    raw = client.chat.completions.with_raw_response.create(
        **options, user="u", metadata={"a": "b"}, store=True, service_tier="flex"
    )
    assert raw.headers["x-hdserve-ignored"] == "service_tier, store"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**options, extra_body={"frobnicate": 1})
    assert caught.value.param == "frobnicate"
    options["messages"] = [{**QUESTION[0], "frobnicate": 1}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**options)
    assert caught.value.param == "messages.frobnicate"


def test_request_ids_are_echoed(client: openai.OpenAI) -> None:
    """The id a client sends comes back once, in the header and in the answer; else one is made."""
    for headers in ({"x-request-id": "trace-7"}, {}):
        raw = client.completions.with_raw_response.create(
            model=MODEL, prompt="a", max_tokens=1, extra_headers=headers
        )
        echoed = raw.headers.get_list("x-request-id")
        assert len(echoed) == 1
        assert raw.parse().id == f"cmpl-{echoed[0]}"
        if headers:
            assert echoed == ["trace-7"]


@pytest.mark.parametrize("sent", ["trace-8", None])
def test_request_ids_are_where_clients_of_messages_look(
    claude: anthropic.Anthropic, sent: str | None
) -> None:
    headers = {} if sent is None else {"x-request-id": sent}
    options: dict[str, Any] = {"messages": QUESTION, "max_tokens": 2, "extra_headers": headers}
    raw = claude.messages.with_raw_response.create(model=MODEL, **options)
    found = raw.parse()._request_id
    assert raw.headers.get_list("x-request-id") == [found]
    assert raw.parse().id == f"msg_{found}"
    assert sent in (None, found)
    with claude.messages.stream(model=MODEL, **options) as stream:
        assert stream.get_final_message().id == f"msg_{stream.request_id}"
    counted = claude.messages.with_raw_response.count_tokens(
        model=MODEL, messages=QUESTION, extra_headers=headers
    )
    assert counted.headers.get_list("request-id") == counted.headers.get_list("x-request-id")
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="no-such-model", **options)
    body: Any = caught.value.body
    assert body["request_id"] == caught.value.request_id
    assert sent in (None, caught.value.request_id)


def test_large_prompts(client: openai.OpenAI) -> None:
    """A prompt that is made tokens in a thread is answered, or refused, like any other."""
    answer = client.completions.create(model=MODEL, prompt=" the" * 1500, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1500
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=" the" * 50_000, max_tokens=2)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    long: Any = [{"role": "user", "content": " the" * 50_000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
        client.chat.completions.create(model=MODEL, messages=long, max_tokens=2)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_the_longest_bodies_are_passed_on(client: openai.OpenAI) -> None:
    """A message of them is more than twice as long, and more than Ray Serve allows by default."""
    kwargs = {"unused": [0.5] * 800_000}
    options: dict[str, Any] = {"chat_template_kwargs": kwargs, "ignore_eos": True}
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=2, extra_body=options
    )
    assert answer.choices[0].finish_reason == "length"


def test_requests_that_once_ended_the_engine(client: openai.OpenAI) -> None:
    """Are refused, and the next one is answered."""
    for number in (2**63, 10**30):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(
                model=MODEL, prompt="a", temperature=1, extra_body={"top_k": number}
            )
        assert caught.value.param == "top_k"
    answer = client.completions.create(
        model=MODEL, prompt="a", temperature=1, extra_body={"top_k": 2**63 - 1}
    )
    assert answer.usage is not None


def test_the_archives_of_the_documents(application: ServedApplication, tmp_path: Path) -> None:
    """What was exported is imported, by the commands that are shown."""
    asked = [words for words in shell_commands() if words[0] == "curl"]
    export, import_ = (words for words in asked if "HDSERVE_ADMIN_KEY" in " ".join(words))

    def answer_of(words: list[str]) -> bytes:
        command = [
            word.replace("$HDSERVE_ADMIN_KEY", ADMIN_KEY).replace(
                "http://localhost:8000", application.base_url
            )
            for word in words
        ]
        return subprocess.run(
            command, cwd=tmp_path, stdout=subprocess.PIPE, check=True, timeout=120
        ).stdout

    assert answer_of(export) == b""
    assert (tmp_path / f"{MODEL}.hdb").stat().st_size > 0
    assert json.loads(answer_of(import_)) == {"num_new_outputs": 0}


def test_tenants_share_no_text_and_the_administrator_sees_all(
    application: ServedApplication,
) -> None:
    """What one tenant generated drafts for it and not for the other, whatever key it uses; the
    administrator lists, exports, flushes and imports it."""
    url = f"{application.base_url}/v1/speculation/databases"
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}

    def accepted(key: str) -> int:
        answer = application.client(key).chat.completions.create(
            model="a",
            messages=[{"role": "user", "content": "Where can I find a quiet place to read?"}],
            temperature=0.9,
            seed=5,
            max_tokens=40,
            extra_body={"ignore_eos": True, "speculation": {"databases": ["model"]}},
        )
        return int(_drafts(answer)["accepted_by_source"].get("model", 0))

    def num_outputs(namespace: str) -> int:
        found = httpx.get(f"{url}/{MODEL}", headers=headers, timeout=WAIT_S).json()["namespaces"]
        return int(found.get(namespace, {"num_outputs": 0})["num_outputs"])

    def wait_for(namespace: str, wanted: int) -> None:
        deadline = time.monotonic() + 60
        while num_outputs(namespace) < wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        assert num_outputs(namespace) >= wanted

    accepted(ANNA_KEY)
    assert accepted(ANNA_KEY) > 10
    assert accepted(OTTO_KEY) < 10
    assert accepted(OTHER_OTTO_KEY) > 10
    wait_for("anna", 2)
    wait_for("otto", 2)
    listed = httpx.get(url, headers=headers, timeout=WAIT_S).json()["data"]
    assert [item["id"] for item in listed] == [MODEL]
    assert {"anna", "otto"} <= set(listed[0]["namespaces"])
    archive = httpx.get(
        f"{url}/a/export", params={"namespace": "otto"}, headers=headers, timeout=WAIT_S
    ).content
    before = num_outputs("otto")
    for namespace, num_flushed in (("otto", before), ("otto", 0), ("otot", 0)):
        params = {"namespace": namespace}
        flushed = httpx.delete(
            f"{url}/{MODEL}", params=params, headers=headers, timeout=WAIT_S
        ).json()
        assert flushed == {"model": MODEL, "flushed": namespace, "num_outputs": num_flushed}
    assert num_outputs("otto") == 0
    assert num_outputs("anna") >= 1
    for content, wanted in (
        (archive, before),  # what was flushed comes back when the administrator wants it
        (archive, 0),
        (_moved(archive, listed[0]["tokenizer_fingerprint"], "new"), before),
    ):
        posted = httpx.post(
            f"{url}/{MODEL}/import", content=content, headers=headers, timeout=WAIT_S
        )
        assert posted.json() == {"num_new_outputs": wanted}
    assert num_outputs("otto") == before
    assert num_outputs("new") == before


def _moved(archive: bytes, fingerprint: str, namespace: str) -> bytes:
    """``archive`` with its outputs in another namespace."""
    key = DatabaseKey(MODEL, fingerprint)
    records = b""
    position = 0
    while (taken := take_record(archive, position)) is not None:
        body, position = taken
        for segment in Publish.decode(body, fingerprint, None).outputs.values():
            message = Publish("test", {namespace: segment})
            records += pack_record(message.encode(key))
    return records + pack_record(encode_end(key))


@pytest.mark.parametrize(
    ("method", "path", "key", "content", "status", "code"),
    [
        ("GET", "", ANNA_KEY, b"", 403, "permission_denied"),
        ("DELETE", f"/{MODEL}?namespace=anna", ANNA_KEY, b"", 403, "permission_denied"),
        ("GET", "/nope", ADMIN_KEY, b"", 404, "model_not_found"),
        ("DELETE", f"/{MODEL}", ADMIN_KEY, b"", 400, "invalid_value"),
        ("POST", f"/{MODEL}/import", ADMIN_KEY, b"x" * 100, 400, "invalid_value"),
        ("POST", f"/{MODEL}/import", ADMIN_KEY, b"\x05\x00\x00\x00", 400, "invalid_value"),
    ],
)
def test_what_is_not_for_everybody(
    application: ServedApplication,
    method: str,
    path: str,
    key: str,
    content: bytes,
    status: int,
    code: str,
) -> None:
    """A tenant's key does not administer, and the administrator's mistakes are named."""
    url = f"{application.base_url}/v1/speculation/databases{path}"
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.request(method, url, headers=headers, content=content, timeout=WAIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)

"""The whole system as a user meets it: ``serve run``, then the real ``openai`` client."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from benchmarks.server_processes import server_processes
from tests.serving import ServedApplication
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.ray

MODELS = ("hdserve-tiny", "hdserve-mini")
DEPLOYMENTS = {"gateway", *(f"model-{name}" for name in MODELS)}
QUESTION = [{"role": "user", "content": "I want to book a table for two in San Jose."}]


def test_models_are_listed(client: openai.OpenAI) -> None:
    """Both bundled models, the default one first, each with what it runs on."""
    listed = list(client.models.list())
    assert tuple(model.id for model in listed) == MODELS
    deadline_s = time.monotonic() + 60
    while not all("max_model_len" in (model.model_extra or {}) for model in listed):
        assert time.monotonic() < deadline_s, "a context is not known in a minute"
        listed = list(client.models.list())
    assert [(model.model_extra or {})["max_model_len"] for model in listed] == [2048, 2048]
    for name in MODELS:
        found = client.models.retrieve(name).model_extra or {}
        assert found["max_model_len"] == 2048
        assert found["num_kv_tokens"] > 2048


@pytest.mark.parametrize("model", MODELS)
def test_stream_equals_whole(client: openai.OpenAI, model: str) -> None:
    """A seeded stream is the seeded whole answer in pieces."""
    options: dict[str, Any] = {
        "model": model,
        "messages": QUESTION,
        "seed": 7,
        "temperature": 0.9,
        "max_completion_tokens": 40,
    }
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 40


def test_a_stream_has_each_log_probability_once(client: openai.OpenAI) -> None:
    """As the client puts it together: its first chunk of a choice has the role alone."""
    options: dict[str, Any] = {
        "model": "hdserve-tiny",
        "messages": QUESTION,
        "seed": 7,
        "max_completion_tokens": 12,
        "n": 2,
        "logprobs": True,
    }
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options) as stream:
        found = stream.until_done().current_completion_snapshot
    assert len(found.choices) == 2
    for choice, wanted in zip(found.choices, whole.choices, strict=True):
        assert choice.message.content == wanted.message.content
        assert choice.logprobs is not None
        assert wanted.logprobs is not None
        tokens, wanted_tokens = choice.logprobs.content or (), wanted.logprobs.content or ()
        assert [token.token for token in tokens] == [token.token for token in wanted_tokens]
        assert choice.finish_reason == wanted.finish_reason


def test_chunks_count_their_tokens(client: openai.OpenAI) -> None:
    """As vLLM's do, if asked; the last count of a choice is that of the whole answer."""
    asked: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.chat.completions.create(
        model=MODELS[0],
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options=asked,
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert last.usage is not None
    assert counts[-1] == last.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage} == {
        last.usage.prompt_tokens
    }


@pytest.mark.parametrize("model", MODELS)
def test_drafts_change_no_token(client: openai.OpenAI, model: str) -> None:
    """With speculation off and on: the same answer, and the statistics say which was which."""
    answers = {}
    for enabled in (False, True, True):
        answer = client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            max_tokens=60,
            extra_body={"speculation": {"enabled": enabled}},
        )
        metrics = (answer.model_extra or {})["metrics"]["speculative_decoding"]
        assert (metrics["num_draft_tokens"] > 0) == enabled
        answers[enabled] = answer.choices[0].message.content
    assert answers[True] == answers[False]


@pytest.mark.parametrize("database", ["context", "model", "statistics"])
def test_each_database_drafts(client: openai.OpenAI, database: str) -> None:
    """A request chooses where its drafts come from; each database alone has something to say."""
    options: dict[str, Any] = {
        "model": MODELS[0],
        "messages": [{"role": "user", "content": "Say it, and say it again: a table for two."}],
        "temperature": 0,
        "max_tokens": 80,
        "extra_body": {"ignore_eos": True, "speculation": {"databases": [database]}},
    }
    client.chat.completions.create(**options)
    answer = client.chat.completions.create(**options)
    metrics = (answer.model_extra or {})["metrics"]["speculative_decoding"]
    assert set(metrics["accepted_by_source"]) == {database}
    assert metrics["accepted_by_source"][database] > 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_goes_on_from_its_beginning(client: openai.OpenAI, is_streamed: bool) -> None:
    """From the text of the last message, by token ids that ``/tokenize`` has as well."""
    asked: dict[str, Any] = {"model": MODELS[1], "temperature": 0, "max_tokens": 24}
    extra: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
    whole = client.chat.completions.create(messages=QUESTION, extra_body=extra, **asked)  # type: ignore[arg-type]
    token_ids = (whole.choices[0].model_extra or {})["token_ids"]
    prompt_ids = (whole.model_extra or {})["prompt_token_ids"]
    assert len(token_ids) == 24
    begun = text_of(client, token_ids[:8])
    messages: Any = [*QUESTION, {"role": "assistant", "content": begun}]
    counted = tokenized(client, messages=messages, continue_final_message=True)
    assert counted["tokens"] == [*prompt_ids, *token_ids[:8]]
    assert len(counted["token_strs"]) == counted["count"]
    asked["max_tokens"] = 16
    extra["continue_final_message"] = True
    if is_streamed:
        stream = client.chat.completions.create(
            messages=messages, extra_body=extra, stream=True, **asked
        )
        chunks = list(stream)
        found = [ids for c in chunks for ids in (c.choices[0].model_extra or {})["token_ids"]]
        prompts = [(chunk.model_extra or {}).get("prompt_token_ids") for chunk in chunks]
        assert prompts == [counted["tokens"], *[None] * (len(chunks) - 1)]
    else:
        rest = client.chat.completions.create(messages=messages, extra_body=extra, **asked)
        assert (rest.model_extra or {})["prompt_token_ids"] == counted["tokens"]
        found = (rest.choices[0].model_extra or {})["token_ids"]
    assert found == token_ids[8:]


def test_only_allowed_tokens_are_chosen(client: openai.OpenAI) -> None:
    """Drafted or not, as a question with few answers wants it."""
    allowed = post(client, "tokenize", {"model": MODELS[1], "prompt": " yes no\n"})["tokens"]
    for is_enabled in (True, False):
        extra = {
            "allowed_token_ids": allowed,
            "return_token_ids": True,
            "speculation": {"enabled": is_enabled},
        }
        answer = client.chat.completions.create(
            model=MODELS[1],
            messages=QUESTION,
            max_tokens=12,
            seed=3,
            extra_body=extra,  # type: ignore[arg-type]
        )
        found = (answer.choices[0].model_extra or {})["token_ids"]
        assert len(found) == 12
        assert set(found) <= set(allowed)


def test_a_text_is_no_conversation(client: openai.OpenAI) -> None:
    """What would change the prompt of one is refused beside a text."""
    for fields in (
        {"continue_final_message": True},
        {"tools": [{}]},
        {"add_generation_prompt": False},
    ):
        body = {"model": MODELS[1], "prompt": "hi", **fields}
        with pytest.raises(openai.BadRequestError):
            post(client, "tokenize", body)
    neutral = {"continue_final_message": False, "add_generation_prompt": True, "tools": []}
    body = {"model": MODELS[1], "prompt": "hi"}
    assert post(client, "tokenize", {**body, **neutral}) == post(client, "tokenize", body)


def tokenized(client: openai.OpenAI, **fields: Any) -> dict[str, Any]:
    """What the server's tokenizer makes of a conversation."""
    body = {"model": MODELS[1], "return_token_strs": True, **fields}
    found: dict[str, Any] = post(client, "tokenize", body)
    return found


def text_of(client: openai.OpenAI, token_ids: list[int]) -> str:
    found: str = post(client, "detokenize", {"model": MODELS[1], "tokens": token_ids})["prompt"]
    return found


def post(client: openai.OpenAI, route: str, body: dict[str, Any]) -> Any:
    """The answer of a route beside ``/v1``."""
    return client.with_options(base_url=str(client.base_url).replace("/v1/", "/")).post(
        f"/{route}", body=body, cast_to=object
    )


def test_choices_and_logprobs(client: openai.OpenAI) -> None:
    """``n`` choices differ; log probabilities cover the answer's tokens."""
    answer = client.chat.completions.create(
        model=MODELS[0],
        messages=QUESTION,
        n=3,
        seed=1,
        max_tokens=12,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        assert "".join(token.token for token in tokens).startswith(choice.message.content or "")
        assert all(len(token.top_logprobs) == 2 for token in tokens)
        assert all(token.logprob <= 0 for token in tokens)


def test_stop_strings(client: openai.OpenAI) -> None:
    """The text ends before the stop string, streamed and whole."""
    options: dict[str, Any] = {
        "model": MODELS[0],
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 60,
    }
    full = client.chat.completions.create(**options).choices[0].message.content or ""
    stop = full[10:14]
    answer = client.chat.completions.create(**options, stop=[stop]).choices[0]
    assert answer.message.content == full[: full.index(stop)]
    assert answer.finish_reason == "stop"
    pieces = client.chat.completions.create(**options, stop=stop, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == full[: full.index(stop)]


def test_completions(client: openai.OpenAI) -> None:
    """Texts, token ids and lists of them; ``echo`` repeats the prompt."""
    body: dict[str, Any] = {"model": MODELS[0], "max_tokens": 8, "temperature": 0}
    one = client.completions.create(prompt="The restaurant", echo=True, **body)
    assert one.choices[0].text.startswith("The restaurant")
    ids = httpx.post(
        f"{client.base_url}".removesuffix("v1/") + "tokenize",
        json={"model": MODELS[0], "prompt": "The restaurant"},
        timeout=WAIT_S,
    ).json()["tokens"]
    by_ids = client.completions.create(prompt=[ids, ids], n=2, **body)
    assert [choice.index for choice in by_ids.choices] == [0, 1, 2, 3]
    assert "The restaurant" + by_ids.choices[0].text == one.choices[0].text
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 2 * len(ids)
    for blank in (None, ""):
        without = client.completions.create(prompt=blank, echo=True, logprobs=0, **body)
        assert without.usage is not None
        assert without.usage.prompt_tokens == 1
        assert without.choices[0].logprobs is not None
        assert without.choices[0].logprobs.text_offset[:2] == [0, 0]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt=[1 << 20], echo=True, **body)
    assert caught.value.param == "prompt"


def test_content_parts(client: openai.OpenAI) -> None:
    """A message may be a list of text parts."""
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    options: dict[str, Any] = {"model": MODELS[0], "temperature": 0, "max_tokens": 10}
    found = client.chat.completions.create(messages=parts, **options)
    whole = client.chat.completions.create(messages=QUESTION, **options)
    assert found.choices[0].message.content == whole.choices[0].message.content


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ERRORS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "nope"}, 404, "model_not_found", "model"),
    ({"temperature": -1}, 400, "invalid_value", "temperature"),
    ({"temperature": "warm"}, 400, "invalid_value", "temperature"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"n": 0}, 400, "invalid_value", "n"),
    ({"top_logprobs": 3}, 400, "invalid_value", "top_logprobs"),
    ({"logit_bias": {"99999": 1}}, 400, "invalid_value", "logit_bias"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "unsupported_parameter",
        "tools",
    ),
    ({"tools": [{"type": "function"}]}, 400, "invalid_value", "tools"),
    ({"guided_regex": "("}, 400, "invalid_value", "guided_regex"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"not": {}}, "strict": True},
            }
        },
        400,
        "unsupported_parameter",
        "response_format",
    ),
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": [{"role": "function", "content": "a"}]}, 400, "invalid_value", "messages"),
    (
        {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [CALL]}]},
        400,
        "unsupported_parameter",
        "messages",
    ),
    (
        {"messages": [{"role": "user", "content": "word " * 4000}]},
        400,
        "context_length_exceeded",
        "messages",
    ),
    ({"messages": [{"role": "user", "content": "x" * 5_000_000}]}, 413, "request_too_large", None),
]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("change", "status", "code", "param"), ERRORS)
def test_errors(
    application: ServedApplication,
    change: dict[str, Any],
    status: int,
    code: str,
    param: str | None,
    is_streamed: bool,
) -> None:
    """Each mistake gets its status, slug and parameter before anything is streamed."""
    body = {"model": MODELS[0], "messages": QUESTION, "max_tokens": 4, "stream": is_streamed}
    answer = httpx.post(
        f"{application.base_url}/v1/chat/completions", json={**body, **change}, timeout=60
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert len(error["message"]) < 1000


def test_client_errors_have_their_classes(client: openai.OpenAI) -> None:
    """The openai client raises what its users catch."""
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="nope", messages=QUESTION)
    assert error.value.code == "model_not_found"
    assert "hdserve-tiny" in error.value.message


def test_ignored_fields_are_named(application: ServedApplication) -> None:
    """A field nobody documents is accepted and named in a header."""
    body = {"model": MODELS[0], "messages": QUESTION, "max_tokens": 1, "frobnicate": 1}
    answer = httpx.post(f"{application.base_url}/v1/chat/completions", json=body, timeout=WAIT_S)
    assert answer.headers["x-hdserve-ignored"] == "frobnicate"


Day = Literal["monday", "friday"]
Guests = dict[Day, Literal[1, 2, 3]]


class Booking(BaseModel):
    guests: Guests


class Wishes(Booking):
    tags: Annotated[set[Literal["quiet", "window", "garden"]], Field(max_length=3)]


def test_models_of_pydantic_are_held(client: openai.OpenAI) -> None:
    """The client sends them as strict: dictionaries of listed keys are held, and sets, whose items
    differ, are refused where they are."""
    options: dict[str, Any] = {"model": MODELS[1], "messages": QUESTION, "max_tokens": 200}
    answer = client.chat.completions.parse(**options, response_format=Booking)
    assert answer.choices[0].message.parsed is not None
    path = "response_format.json_schema.schema.properties.tags.uniqueItems"
    with pytest.raises(openai.BadRequestError, match=f"cannot be enforced: {path}") as caught:
        client.chat.completions.parse(**options, response_format=Wishes)
    assert caught.value.param == "response_format"


def test_what_cannot_be_held_of_a_model_is_named(client: openai.OpenAI) -> None:
    """Where it is not strict, whole or streamed."""
    options: dict[str, Any] = {"model": MODELS[1], "messages": QUESTION, "max_tokens": 200}
    schema = Wishes.model_json_schema()
    form: Any = {"type": "json_schema", "json_schema": {"name": "wishes", "schema": schema}}
    raw = client.chat.completions.with_raw_response.create(**options, response_format=form)
    path = "properties.tags.uniqueItems"
    assert raw.headers["x-hdserve-ignored"] == f"response_format.json_schema.schema.{path}"
    text = raw.parse().choices[0].message.content
    assert text is not None
    Wishes.model_validate_json(text)
    event = client.chat.completions.with_raw_response.create(
        **options, response_format=form, stream=True
    )
    assert event.headers["x-hdserve-ignored"] == raw.headers["x-hdserve-ignored"]


def test_small_routes(application: ServedApplication) -> None:
    """Health, readiness, version, documentation, and text to ids and back."""
    get, post = httpx.get, httpx.post
    url = application.base_url
    assert get(f"{url}/health").json() == {"status": "ok"}
    assert httpx.head(f"{url}/health").status_code == 200
    assert get(f"{url}/ready").json()["status"] == "ready"
    assert get(f"{url}/version").json()["version"]
    assert get(f"{url}/docs").status_code == 200
    assert "/v1/chat/completions" in get(f"{url}/openapi.json").json()["paths"]
    assert get(f"{url}/nowhere").json()["error"]["code"] == "invalid_route"
    text = "Grüße, 你好!"
    tokens = post(f"{url}/tokenize", json={"model": MODELS[1], "prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    back = post(f"{url}/detokenize", json={"model": MODELS[1], "tokens": tokens["tokens"]})
    assert back.json() == {"prompt": text}
    chat = post(f"{url}/tokenize", json={"model": MODELS[1], "messages": QUESTION}).json()
    assert chat["count"] > 10


def test_every_process_has_one_event_loop(application: ServedApplication) -> None:
    """Gateway and replicas run as ``deployments.runtime`` says, without a word in the environment
    of the server."""
    processes = [item for item in server_processes(application.pid) if item.name in DEPLOYMENTS]
    assert {process.name for process in processes} == DEPLOYMENTS
    for process in processes:
        variables = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
        assert "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0" in variables
        assert "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0" in variables
        assert "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1" in variables


def test_disconnect_frees_the_slot(application: ServedApplication) -> None:
    """A client that goes away in mid-stream leaves no running sequence behind."""
    body = {
        "model": MODELS[0],
        "messages": QUESTION,
        "stream": True,
        "ignore_eos": True,
        "speculation": {"enabled": False},
    }
    with httpx.stream(
        "POST", f"{application.base_url}/v1/chat/completions", json=body, timeout=WAIT_S
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert _num_running(application) == 1
    deadline = time.monotonic() + 30
    while _num_running(application) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _num_running(application) == 0


def test_concurrent_requests_get_their_own_answers(client: openai.OpenAI) -> None:
    """Requests in one batch get what each gets alone."""

    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODELS[0], messages=QUESTION, seed=seed, max_tokens=20, temperature=1.0
        )
        return answer.choices[0].message.content

    alone = [ask(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone


def _num_running(application: ServedApplication) -> int:
    url = f"{application.base_url}/v1/models/{MODELS[0]}"
    found: int = httpx.get(url, timeout=WAIT_S).json()["num_running"]
    return found


def test_prediction_is_drafted_from(client: openai.OpenAI) -> None:
    """A right prediction is accepted from the context; a wrong one changes nothing; the usage says
    how much of it came."""
    options: dict[str, Any] = {
        "model": MODELS[1],
        "messages": [{"role": "user", "content": "Where can I find a quiet place to read?"}],
        "temperature": 0.8,
        "seed": 11,
        "max_tokens": 50,
    }
    only_context = {
        "ignore_eos": True,
        "speculation": {"databases": ["context"], "share_output": False},
    }
    plain = client.chat.completions.create(**options, extra_body=only_context)
    text = plain.choices[0].message.content or ""
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    accepted, came = {}, {}
    for prediction in (text, "Nothing of the kind. " * 5):
        answer = client.chat.completions.create(
            **options,
            prediction={"type": "content", "content": prediction},
            extra_body=only_context,
        )
        assert answer.choices[0].message.content == text
        metrics = (answer.model_extra or {})["metrics"]["speculative_decoding"]
        accepted[prediction == text] = metrics["accepted_by_source"].get("context", 0)
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        num_came = details.accepted_prediction_tokens or 0
        came[prediction == text] = num_came - (details.rejected_prediction_tokens or 0)
    assert accepted[True] > accepted[False]
    assert came[True] > 20 > 0 > came[False]


def test_request_ids_may_repeat(application: ServedApplication) -> None:
    """Clients that send the same ``x-request-id`` at the same time all get their own answers."""

    def answer(number: int) -> httpx.Response:
        return httpx.post(
            f"{application.base_url}/v1/completions",
            headers={"x-request-id": "the-same"},
            json={
                "model": MODELS[1],
                "prompt": "The first thing",
                "seed": number % 2,
                "max_tokens": 40,
                "\u00e9\r\nx: y": 1,
            },
            timeout=60,
        )

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(answer, range(6)))
    assert {found.status_code for found in answers} == {200}
    assert {found.json()["id"] for found in answers} == {"cmpl-the-same"}
    assert answers[0].headers["x-hdserve-ignored"] == "\\xe9\\r\\nx: y"
    texts = [found.json()["choices"][0]["text"] for found in answers]
    assert texts == texts[:2] * 3
    assert texts[0] != texts[1]


def test_the_log_has_a_line(application: ServedApplication, client: openai.OpenAI) -> None:
    """For an interval in which something ran, mostly one of the tests above."""
    client.completions.create(
        model=MODELS[1], prompt="A taxi", max_tokens=60, extra_body={"ignore_eos": True}
    )

    def is_there() -> bool:
        lines = application.log_path.read_text().splitlines()
        return any(
            f"{MODELS[1]}: prompt " in line and "mean acceptance length" in line for line in lines
        )

    eventually(is_there)

"""The page in a real browser, against a gateway that wants a key and whose models do not run."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from deployments.gateway import Gateway
from deployments.routes import build_api
from hdserve.access import Access, ApiKey
from hdserve.config import default_config
from tests.browser import TIMEOUT_MS, light_context
from tests.deployments.page import QUESTION, ask, wait_for_end

pytestmark = pytest.mark.ray

MODELS = ["hdserve-tiny", "hdserve-mini"]
KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with light_context(tmp_path_factory.mktemp("profile")) as context:
        yield context


@pytest.fixture(scope="module")
def locked_url() -> Iterator[str]:
    """A gateway without models that wants a key."""
    access = Access((ApiKey(hashlib.sha256(KEY.encode()).digest(), "default"),))
    api = build_api(Gateway(default_config(), {}, access))
    server = uvicorn.Server(uvicorn.Config(api, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_files_and_headers(locked_url: str) -> None:
    """Everything comes from this server, needs no key, may load nothing from elsewhere, and is not
    sent twice."""
    found = httpx.get(f"{locked_url}/playground", follow_redirects=True)
    assert found.url == f"{locked_url}/"
    policy = found.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert not [rule for rule in policy if "unsafe" in rule or "http" in rule or "*" in rule]
    linked = re.findall(r'(?:href|src)="(page/[^"]+)"', found.text)
    assert linked
    for path in linked:
        answer = httpx.get(f"{locked_url}/{path}")
        assert answer.headers["content-security-policy"] == "; ".join(policy)
        etag = {"if-none-match": answer.headers["etag"]}
        assert httpx.get(f"{locked_url}/{path}", headers=etag).status_code == 304
    for path in ("page/__init__.py", "page/none.js", "page/..%2fgateway.py"):
        assert httpx.get(f"{locked_url}/{path}").status_code == 404


def test_files_of_the_documentation(locked_url: str) -> None:
    """They come from this server, too, and need no key."""
    for path in ("docs", "redoc"):
        html = httpx.get(f"{locked_url}/{path}").text
        linked = re.findall(r'(?:href|src)="([^"]+)"', html)
        assert len(linked) >= 2
        for link in linked:
            assert re.match(r"/(?!/)", link), f"{path} loads {link}"
            assert httpx.get(f"{locked_url}{link}").content
    assert httpx.get(f"{locked_url}/docs/files/..%2fcore.py").status_code == 404


@pytest.mark.parametrize(
    ("path", "missed"), [("docs", []), ("redoc", ["https://cdn.redoc.ly/redoc/logo-mini.svg"])]
)
def test_documentation_is_drawn_where_nothing_else_is_reached(
    context: Any, locked_url: str, path: str, missed: list[str]
) -> None:
    """Only the logo of Redoc may be missing; it is asked for at last."""
    page = context.new_page()
    others: list[str] = []

    def refuse_others(route: Any) -> None:
        if route.request.url.startswith((locked_url, "data:", "blob:")):
            route.continue_()
        else:
            others.append(route.request.url)
            route.abort()

    page.route("**/*", refuse_others)
    page.goto(f"{locked_url}/{path}")
    page.get_by_text("/v1/chat/completions").first.wait_for(state="attached")
    page.close()
    assert set(others) <= set(missed)


def test_a_refused_question_is_in_the_field_again(context: Any, locked_url: str) -> None:
    """The reason is told, and the question is no part of the conversation."""
    page = context.new_page()
    page.goto(locked_url)
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key", exact=True).fill(KEY)
    dialog.get_by_role("button", name="Use it").click()
    page.locator("#model option").first.wait_for(state="attached")
    for _ in range(2):
        with page.expect_response("**/v1/chat/completions") as answered:
            ask(page, seed="1.5")
        sent = answered.value.request.post_data_json["messages"]
        assert sent == [{"role": "user", "content": QUESTION}]
        page.locator("#status.is-bad", has_text="seed").wait_for(timeout=20_000)
        page.locator("#hello").wait_for()
        assert page.get_by_label("Message").input_value() == QUESTION
        assert page.locator(".asked, .answer").count() == 0
    page.close()


def test_reasoning_is_a_block_of_its_own(context: Any, locked_url: str) -> None:
    """It can be folded, and goes back with the conversation; a step with both is in both."""
    deltas = [
        ({}, ["<think>"]),
        ({"reasoning_content": "Two"}, ["Two"]),
        ({"reasoning_content": " and two.", "content": "Four"}, [" and two.", "</think>", "Four"]),
        ({"content": "."}, [".", ""]),
    ]
    chunks = [
        {
            "choices": [
                {
                    "delta": delta,
                    "token_sources": [{"text": text, "source": "plain"} for text in texts],
                }
            ]
        }
        for delta, texts in deltas
    ]
    events = [*map(json.dumps, chunks), "[DONE]"]
    body = "".join(f"data: {event}\n\n" for event in events)
    page = context.new_page()
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    page.goto(locked_url)
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key", exact=True).fill(KEY)
    dialog.get_by_role("button", name="Use it").click()
    page.locator("#model option").first.wait_for(state="attached")
    answer = ask(page)
    wait_for_end(page)
    steps = answer.locator(".reasoning .step")
    assert "".join(steps.all_text_contents()) == "<think>Two and two.</think>"
    assert "".join(answer.locator("> .step").all_text_contents()) == "Four."
    assert "in 4 forward passes" in page.locator(".answer-end").inner_text()
    answer.locator(".reasoning summary").click()
    assert not steps.first.is_visible()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page)
    _, said, _ = sent.value.post_data_json["messages"]
    assert said == {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
    page.close()


def with_key(context: Any, url: str) -> Any:
    """A new tab, to which the key has been given."""
    page = context.new_page()
    page.goto(url)
    use_key(page)
    return page


def use_key(page: Any) -> None:
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key", exact=True).fill(KEY)
    dialog.get_by_role("button", name="Use it").click()
    page.locator("#model option").first.wait_for(state="attached")


def test_an_answer_that_breaks_off(context: Any, locked_url: str) -> None:
    """A stream that ends without its mark is no whole answer, alone and side by side."""
    delta = {"delta": {"content": "Half"}, "token_sources": [{"text": "Half", "source": "plain"}]}
    body = f"data: {json.dumps({'choices': [delta]})}\n\n"
    page = with_key(context, locked_url)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    answer = ask(page)
    wait_for_end(page)
    said = page.locator("#status.is-bad", has_text="The answer broke off.")
    said.wait_for()
    assert answer.inner_text() == "Half"
    assert page.locator(".answer-end").inner_text().endswith("failed")
    page.reload()
    page.locator("#model option").first.wait_for(state="attached")
    page.get_by_role("tab", name="Side by side").click()
    page.get_by_role("button", name="Race").click()
    said.wait_for()
    assert page.locator("#verdict").inner_text() == ""
    page.close()


def test_the_databases_are_asked_for_once_at_a_time(context: Any, locked_url: str) -> None:
    """However long a model takes to answer; a new look begins once it has."""
    held: list[Any] = []
    page = context.new_page()
    page.clock.install()
    page.route("**/metrics", lambda route: route.fulfill(body=""))
    page.route("**/v1/models/*", lambda route: held.append(route))
    page.goto(locked_url)
    use_key(page)
    page.get_by_role("tab", name="Databases").click()

    def wait_for_questions(number: int) -> None:
        for _ in range(TIMEOUT_MS // 100):
            if len(held) >= number:
                return
            page.wait_for_timeout(100)

    wait_for_questions(len(MODELS))
    page.clock.run_for(20_000)
    page.wait_for_timeout(500)
    assert len(held) == len(MODELS)
    for route in held:
        route.fulfill(status=503, json={})
    page.get_by_text("no replica answers").first.wait_for()
    page.clock.run_for(2_000)
    wait_for_questions(2 * len(MODELS))
    assert len(held) == 2 * len(MODELS)
    page.close()


def test_the_key_is_asked_for_and_kept_in_the_tab(context: Any, locked_url: str) -> None:
    """A wrong one is asked for again; the right one is kept nowhere else, and can be forgotten."""
    page = context.new_page()
    page.goto(locked_url)
    dialog = page.get_by_role("dialog", name="API key")
    dialog.wait_for()
    for key in ("wrong", KEY):
        dialog.get_by_label("Key", exact=True).fill(key)
        with page.expect_response("**/v1/models") as answered:
            dialog.get_by_role("button", name="Use it").click()
        assert answered.value.status == (200 if key == KEY else 401)
    page.locator("#model option").first.wait_for(state="attached")
    assert not dialog.is_visible()
    assert page.evaluate("[...Object.values(sessionStorage)]") == [KEY]
    assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    page.get_by_role("button", name="Key").click()
    dialog.get_by_role("button", name="Forget it").click()
    dialog.wait_for()
    assert page.evaluate("sessionStorage.length") == 0
    page.close()

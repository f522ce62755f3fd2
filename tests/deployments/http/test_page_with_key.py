"""The page chats with a server that wants a key, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.browser import CHROMIUM, browser_context
from tests.serving import ServedApplication

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
]

MODEL = "hdserve-mini"
QUESTION = "I want to book a table for two in San Jose."
KEY = "a-key-of-the-tests"
TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    """A model whose answers are the same each time, and drafted."""
    directory = tmp_path_factory.mktemp("serve")
    (directory / "keys").write_text(f"{KEY} default\n")
    settings = {"engine": {"exact": True}, "drafting": {"adapts_budget": False}}
    config = {
        "models": [{"name": MODEL, "model": MODEL, **settings}],
        "access": {"api_keys_file": str(directory / "keys")},
    }
    with ServedApplication(directory, config) as served:
        yield served


@pytest.fixture
def page(application: ServedApplication, tmp_path: Path) -> Iterator[Any]:
    """The page, to which the key has been given."""
    with browser_context(tmp_path) as context:
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.goto(application.base_url)
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key", exact=True).fill(KEY)
        dialog.get_by_role("button", name="Use it").click()
        page.locator("#model option").first.wait_for(state="attached")
        yield page


def test_a_chat_is_streamed(page: Any, application: ServedApplication) -> None:
    """Token by token, with the key in the header and nowhere else; the text is that of the API."""
    page.locator(".settings").evaluate("settings => { settings.open = true }")
    page.locator("#temperature").fill("0")
    page.locator("#max-tokens").fill("40")
    page.get_by_label("Message").fill(QUESTION)
    with page.expect_response("**/v1/chat/completions") as answered:
        page.get_by_role("button", name="Send").click()
    response = answered.value
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.request.all_headers()["authorization"] == f"Bearer {KEY}"
    assert KEY not in response.request.url + response.request.post_data
    page.locator("#again:enabled").wait_for()
    answer = page.locator(".answer").last
    assert answer.locator(".step").count() > 1
    wanted = application.client(KEY).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=40,
    )
    assert answer.text_content() == wanted.choices[0].message.content


def test_databases_are_shown(page: Any) -> None:
    """What the page asks for besides the chat carries the key, too."""
    with page.expect_response("**/metrics") as answered:
        page.get_by_role("tab", name="Databases").click()
    assert answered.value.status == 200
    assert answered.value.request.all_headers()["authorization"] == f"Bearer {KEY}"
    rows = page.get_by_role("region", name=f"Databases of {MODEL}").locator("tbody tr")
    rows.first.wait_for()
    assert "statistics" in rows.locator("th").all_inner_texts()


def test_databases_come_when_the_key_is_there(
    application: ServedApplication, tmp_path: Path
) -> None:
    """Where the page was opened at them, as a bookmark does; and again after a restart."""
    with browser_context(tmp_path) as context:
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.goto(f"{application.base_url}/#databases")
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key", exact=True).fill(KEY)
        dialog.get_by_role("button", name="Use it").click()
        page.get_by_role("region", name=f"Databases of {MODEL}").wait_for()

        page.route("**/metrics", lambda route: route.fulfill(status=503, body="{}"))
        page.get_by_text("The server answered 503").wait_for()
        with page.expect_response(lambda response: response.ok and "metrics" in response.url):
            page.unroute("**/metrics")
        page.get_by_text("The server answered 503").wait_for(state="hidden")


def test_without_the_key_nothing_is_answered(application: ServedApplication) -> None:
    with pytest.raises(openai.AuthenticationError):
        application.client().models.list()

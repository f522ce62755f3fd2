"""The page at ``/`` in a real browser, against a real server."""

from __future__ import annotations

import gc
import hashlib
import json
import re
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import httpx
import pytest
import uvicorn

from deployments.gateway import Gateway
from deployments.routes import build_api
from hdserve.access import Access, ApiKey
from hdserve.config import default_config
from tests.browser import CHROMIUM, browser_context
from tests.documents import commands, shell_commands, texts
from tests.serving import ServedApplication

pytestmark = pytest.mark.ray

MODELS = ["hdserve-tiny", "hdserve-mini"]
QUESTION = "I want to book a table for two in San Jose."
KEY = "a-key-of-the-tests"
TIMEOUT_MS = 60_000
NOTHING = "\N{EN DASH}"
"""In a table."""


@pytest.fixture(scope="module")
def application(bundled_application: ServedApplication) -> ServedApplication:
    return bundled_application


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with browser_context(tmp_path_factory.mktemp("profile"), color_scheme="light") as context:
        context.set_default_timeout(TIMEOUT_MS)
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


@pytest.fixture
def page(application: ServedApplication, context: Any) -> Iterator[Any]:
    """A new tab with the page; whatever the console reports as an error fails the test."""
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.goto(application.base_url)
    page.locator("#model option").first.wait_for(state="attached")
    yield page
    page.close()
    assert problems == []


def ask(page: Any, question: str = QUESTION, **settings: str) -> Any:
    """Send a message; the element of the answer that begins."""
    page.locator(".settings").evaluate("settings => { settings.open = true }")
    for name, value in settings.items():
        page.locator(f"#{name}").fill(value)
    page.get_by_label("Message").fill(question)
    page.get_by_role("button", name="Send").click()
    return page.locator(".answer").last


def wait_for_end(page: Any) -> None:
    page.locator("#again:enabled").wait_for()


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


def test_the_stream_says_where_tokens_come_from(application: ServedApplication) -> None:
    """Texts of the tokens are the answer, what was accepted is in the draft, and by default nothing
    is said."""
    options: dict[str, Any] = {
        "model": MODELS[0],
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 60,
        "stream": True,
    }
    client = application.client()
    asked = {"include_usage": True, "include_sources": True}
    *chunks, last = client.chat.completions.create(**options, stream_options=asked)
    choices = [chunk.choices[0] for chunk in chunks]
    extra = [choice.model_extra or {} for choice in choices]
    tokens = [token for step in extra for token in step["token_sources"]]
    content = "".join(choice.delta.content or "" for choice in choices)
    assert "".join(token["text"] for token in tokens) == content
    assert last.usage is not None
    assert len(tokens) == last.usage.completion_tokens
    counts = (last.model_extra or {})["metrics"]["speculative_decoding"]
    *before, end = tokens  # the last token of a step counts as its bonus, drafted or not
    for source, count in counts["accepted_by_source"].items():
        assert sum(token["source"] == source for token in before) == count
    drafts = [node for step in extra for node in step["draft"]]
    assert len(drafts) == counts["num_draft_tokens"]
    num_accepted = sum(node["accepted"] for node in drafts) - (end["source"] != "plain")
    assert num_accepted == counts["num_accepted_draft_tokens"] > 0
    for chunk in client.chat.completions.create(**options):
        assert not {"token_sources", "draft"} & set(chunk.choices[0].model_extra or {})


def test_a_chat_is_coloured_by_source(page: Any) -> None:
    """Tokens stream with classes, numbers follow, the draft shows on focus, arrows move on."""
    answer = ask(page)
    wait_for_end(page)
    text = answer.inner_text()
    assert len(text) > 10
    ask(page)  # what was generated is in the model database now
    wait_for_end(page)
    drafted = page.locator(".token.context, .token.model, .token.statistics")
    assert drafted.count() > 0
    plain, coloured = page.locator(".token.plain").first, drafted.first
    background = "element => getComputedStyle(element).backgroundColor"
    assert plain.evaluate(background) != coloured.evaluate(background)
    dials = page.locator("#chat-meter dd").all_inner_texts()
    assert all(re.fullmatch(r"[\d.,]+", dial) for dial in dials), dials
    assert float(dials[1]) > 1
    step = page.locator(".answer").last.locator(".step").first
    step.focus()
    popover = page.get_by_role("tooltip")
    assert popover.inner_text().startswith("Step 1:")
    page.keyboard.press("ArrowRight")
    assert popover.inner_text().startswith("Step 2:")
    page.keyboard.press("Escape")
    assert not popover.is_visible()
    page.locator(".answer").last.locator(".step").nth(1).hover()
    assert popover.inner_text().startswith("Step 2:")


def test_figures_follow_the_stream(page: Any) -> None:
    """They change while tokens come; in the end they are of the tokens that are shown."""
    page.evaluate(
        """() => {
            window.seen = new Set();
            const meter = document.getElementById("chat-meter");
            new MutationObserver(() => {
                if (document.querySelector(".answer[aria-busy=true]"))
                    window.seen.add(meter.querySelectorAll("dd")[2].textContent);
            }).observe(meter, { childList: true, subtree: true, characterData: true });
        }"""
    )
    ask(page, temperature="1.2", **{"max-tokens": "200"})
    wait_for_end(page)
    meter = page.locator("#chat-meter")
    num_tokens = int(meter.locator("dd").nth(2).inner_text())
    seen = {int(text) for text in page.evaluate("[...window.seen]")}
    assert any(0 < number < num_tokens for number in seen)
    shown = meter.locator(".sources li").evaluate_all(
        "rows => rows.map(row => [row.childNodes[1].textContent, row.lastChild.textContent])"
    )
    counts = {source: int(count) for source, count in shown}
    assert set(counts) >= {"context", "model", "statistics", "plain"}
    assert sum(counts.values()) == num_tokens
    for source, count in counts.items():
        num_shown = page.locator(f".answer .token.{source}").count()
        assert count - 1 <= num_shown <= count, "the end of an answer has no text"


def test_regenerate_and_new_chat(page: Any) -> None:
    """The answer is replaced under another seed; a new chat is empty."""
    ask(page, temperature="1.2", **{"max-tokens": "40"})
    wait_for_end(page)
    first = page.locator(".answer").inner_text()
    page.get_by_role("button", name="Regenerate").click()
    wait_for_end(page)
    assert page.locator(".answer").count() == 1
    assert page.locator(".answer").inner_text() != first
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".answer").count() == 0
    assert page.locator("#hello").is_visible()


def test_stop(page: Any, application: ServedApplication) -> None:
    """Stopping ends the answer here and in the engine."""
    page.locator("#model").select_option("hdserve-mini")
    page.evaluate(
        """new MutationObserver(() => {
            if (document.querySelector(".step")) document.getElementById("stop").click();
        }).observe(document.getElementById("turns"), { childList: true, subtree: true })"""
    )
    answer = ask(page, "Go on and on.", **{"max-tokens": "2000"})
    wait_for_end(page)
    assert page.locator(".answer-end").inner_text().endswith("stopped")
    assert answer.get_attribute("aria-busy") == "false"
    for _ in range(100):
        model = httpx.get(f"{application.base_url}/v1/models/hdserve-mini").json()
        if not model["num_running"]:
            return
        page.wait_for_timeout(100)
    raise AssertionError("the engine goes on")


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


def test_side_by_side(page: Any) -> None:
    """Both lanes show the same text; only one of them drafted."""
    page.get_by_role("tab", name="Side by side").click()
    page.get_by_role("button", name="Race").click()
    page.get_by_text("The same text").wait_for()
    texts = page.locator(".lanes .answer").all_inner_texts()
    assert texts[0] == texts[1] != ""
    assert page.locator("#lane-plain .token:not(.plain)").count() == 0
    assert page.locator("#lane-drafts .token:not(.plain)").count() > 0


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_race_with_two_texts(page: Any, is_exact: bool) -> None:
    """Rounding is named where the model is not exact, and the maintainers where it is."""

    def ask_otherwise(route: Any) -> None:
        body = route.request.post_data_json
        if not body["speculation"]["enabled"]:
            body["messages"][0]["content"] = "Good morning."
        route.continue_(post_data=json.dumps(body))

    def describe_otherwise(route: Any) -> None:
        found = route.fetch()
        assert found.json()["is_exact"] is True
        route.fulfill(response=found, json={**found.json(), "is_exact": is_exact})

    page.route("**/v1/chat/completions", ask_otherwise)
    page.route("**/v1/models/*", describe_otherwise)
    page.get_by_role("tab", name="Side by side").click()
    page.get_by_role("button", name="Race").click()
    page.get_by_text("please report" if is_exact else "near-tie").wait_for()


def test_the_model_is_chosen(page: Any) -> None:
    """Both models can be picked, and the request names the one that was."""
    assert page.locator("#model option").all_inner_texts() == MODELS
    page.locator("#model").select_option("hdserve-mini")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, **{"max-tokens": "5"})
    assert sent.value.post_data_json["model"] == "hdserve-mini"
    wait_for_end(page)


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


def test_databases_and_replicas(page: Any) -> None:
    """Each model has its databases, with sizes and how often they were right, and its replicas."""
    ask(page)
    wait_for_end(page)
    page.get_by_role("tab", name="Databases").click()
    for model in MODELS:
        rows = page.get_by_role("region", name=f"Databases of {model}").locator("tbody tr")
        rows.first.wait_for()
        names = rows.locator("th").all_inner_texts()
        assert names == ["model", "statistics", "recycled", "context"]
        statistics = rows.nth(1).locator("td").all_inner_texts()
        assert int(statistics[0].replace(",", "")) > 1000
        assert re.fullmatch(r"[\d.,]+ [KM]iB", statistics[1])
        entries, size = rows.nth(3).locator("td").all_inner_texts()[:2]
        assert re.fullmatch(r"[\d,]+", entries)
        assert re.fullmatch(r"[\d.,]+ ([KM]i)?B", size)
        for name, row in zip(names, rows.all(), strict=True):
            guesses, accepted, rate, age = row.locator("td").all_inner_texts()[2:]
            assert rate == hit_rate(guesses, accepted)
            assert re.fullmatch(r"[\d.,]+ s" if name == "model" else NOTHING, age)
        replicas = page.get_by_role("region", name=f"Replicas of {model}").locator("tbody tr")
        assert replicas.count() == 1
        running, waiting, usage, *_ = replicas.locator("td").all_inner_texts()
        assert (running, waiting) == ("0 of 16", "0")
        assert re.fullmatch(r"[\d.]+ %", usage)
    tokens, length = (
        page.get_by_role("region", name=f"Replicas of {MODELS[0]}").locator("td").all()[3:]
    )
    assert int(tokens.inner_text().replace(",", "")) > 10
    assert float(length.inner_text()) > 1


def hit_rate(guesses: str, accepted: str) -> str:
    num_guesses, num_accepted = (int(text.replace(",", "")) for text in (guesses, accepted))
    if not num_guesses:
        return NOTHING
    rate = Decimal(100 * num_accepted / num_guesses)
    return f"{rate.quantize(Decimal('0.1'), ROUND_HALF_UP)} %"  # as browsers do: 6.25 is 6.3


@pytest.mark.parametrize("view", ["Chat", "Side by side", "Databases"])
def test_a_narrow_window_does_not_scroll_sideways(page: Any, view: str) -> None:
    """On a phone every view fits the width, and each table its place."""
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_role("tab", name=view).click()
    if view == "Databases":
        page.get_by_role("table").first.wait_for()
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 360
    for place in page.locator(".scroll").all():
        assert place.evaluate("place => place.scrollWidth <= place.clientWidth")


def test_dark_and_light(page: Any) -> None:
    """The page follows the system until it is told otherwise; text can be read in both."""
    ink = "getComputedStyle(document.documentElement).color"
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(paper)
    assert contrast(page.evaluate(ink), light) > 7
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(paper)
    assert dark != light
    assert contrast(page.evaluate(ink), dark) > 7
    page.get_by_role("button", name="Theme: auto").click()
    assert page.evaluate(paper) == light
    page.get_by_role("button", name="Theme: light").click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(paper) == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(paper) == light


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two opaque CSS colours (WCAG 2.2, 1.4.3)."""
    low, high = sorted(_luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(c * w for c, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def shown(page: str, language: str, word: str) -> list[str]:
    """The code blocks of a document that have ``word`` in them."""
    return [block for block in texts(page, language) if word in block]


def answer_of(words: list[str], application: ServedApplication) -> dict[str, Any]:
    """What a command says that is to print JSON."""
    base_url = re.compile("(http://)?localhost:8000")
    command = [base_url.sub(application.base_url, word) for word in words]
    found = subprocess.run([*command, "--fail"], capture_output=True, check=True, timeout=120)
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer


def test_the_requests_of_the_documents(application: ServedApplication) -> None:
    """Each ``curl`` is answered."""
    found = [words for words in shell_commands() if words[0] == "curl"]
    assert len(found) == 2
    for words in found:
        assert answer_of(words, application)["choices"][0]["message"]["content"]


def test_the_programs_of_the_documents(
    application: ServedApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    """They print an answer; those of the quick start what was accepted, and each token's source."""
    quick, readme = (
        shown(page, "python", "OpenAI") for page in ("docs/quickstart.md", "README.md")
    )
    assert (len(quick), len(readme)) == (2, 1)
    for program in (*quick, *readme):
        assert "http://localhost:8000" in program
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # a script's client ends with it
            exec(program.replace("http://localhost:8000", application.base_url), {"__name__": "it"})
            gc.collect()
        printed = capsys.readouterr().out
        assert printed.count("\n") >= 2 if program in quick else printed


def test_the_request_of_the_readme(application: ServedApplication) -> None:
    """Its answer looks as it stands there."""
    (text,) = shown("README.md", "sh", "curl")
    (words,) = [words for words in commands(text) if words[0] == "curl"]
    answer = answer_of(words, application)
    (example,) = map(json.loads, shown("README.md", "json", "chatcmpl"))
    assert answer.keys() == example.keys()
    assert answer["choices"][0]["message"]["content"]
    assert answer["metrics"]["speculative_decoding"].keys() == (
        example["metrics"]["speculative_decoding"].keys()
    )

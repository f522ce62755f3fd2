"""The page at ``/`` in a real browser, against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import httpx
import pytest

from tests.deployments.http.page import ask, wait_for_end
from tests.serving import ServedApplication
from tests.waiting import WAIT_S

pytestmark = pytest.mark.ray

MODELS = ["hdserve-tiny", "hdserve-mini"]
NOTHING = "\N{EN DASH}"
"""In a table."""


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
    coloured.hover()
    source = coloured.get_attribute("class").split()[1]
    assert f"{source}, accepted" in popover.inner_text()
    page.keyboard.press("Escape")
    assert not popover.is_visible()


def test_figures_follow_the_stream(page: Any) -> None:
    """They change while tokens come; in the end they are of the tokens that are shown.

    A browser on a busy machine may not draw before an answer has ended; then another is asked for.
    """
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
    meter = page.locator("#chat-meter")
    for _ in range(10):
        page.evaluate("window.seen.clear()")
        ask(page, temperature="1.2", **{"max-tokens": "200"})
        wait_for_end(page)
        num_tokens = int(meter.locator("dd").nth(2).inner_text())
        seen = {int(text) for text in page.evaluate("[...window.seen]")}
        if any(0 < number < num_tokens for number in seen):
            break
    else:
        pytest.fail("the figures changed at the end only, ten times")
    shown = meter.locator(".sources li").evaluate_all(
        "rows => rows.map(row => [row.childNodes[1].textContent, row.lastChild.textContent])"
    )
    counts = {source: int(count) for source, count in shown}
    assert set(counts) >= {"context", "model", "statistics", "plain"}
    assert sum(counts.values()) == num_tokens
    answer = page.locator(".answer").last  # those before it may be of other questions
    num_shown = {name: answer.locator(f".token.{name}").count() for name in counts}
    assert all(num_shown[name] <= count for name, count in counts.items())
    num_hidden = num_tokens - sum(num_shown.values())
    assert num_hidden <= 5, "only a part of a character, and the end, have no text"


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
    endless = "List the numbers from one to five hundred, each on its own line."
    answer = ask(page, endless, **{"max-tokens": "2000"})
    wait_for_end(page)
    assert page.locator(".answer-end").inner_text().endswith("stopped")
    assert answer.get_attribute("aria-busy") == "false"
    for _ in range(100):
        model = httpx.get(f"{application.base_url}/v1/models/hdserve-mini", timeout=WAIT_S).json()
        if not model["num_running"]:
            return
        page.wait_for_timeout(100)
    raise AssertionError("the engine goes on")


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
    """The page follows the system until it is told otherwise; text can be read, and controls be
    told from the paper, in both."""
    ink = "getComputedStyle(document.documentElement).color"
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(paper)
    assert contrast(page.evaluate(ink), light) > 7
    edge = "getComputedStyle(document.getElementById('prompt')).borderTopColor"
    assert contrast(page.evaluate(edge), light) >= 3
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(paper)
    assert dark != light
    assert contrast(page.evaluate(ink), dark) > 7
    assert contrast(page.evaluate(edge), dark) >= 3
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

"""The page in a real browser, against a gateway that wants a key and whose models do not run."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import httpx
import pytest
import uvicorn

from deployments.gateway import Gateway
from deployments.http.routes import build_api
from hdserve.access import Access, ApiKey
from hdserve.config import default_config
from tests.browser import TIMEOUT_MS
from tests.deployments.http.page import QUESTION, ask, wait_for_end

MODELS = ["hdserve-tiny", "hdserve-mini"]
KEY = "a-key-of-the-tests"
LAST_EVENT = "data: [DONE]\n\n"


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
    body = streamed(
        ({"content": ""}, ["<think>"]),
        ({"reasoning_content": "Two"}, ["Two"]),
        ({"reasoning_content": " and two.", "content": "Four"}, [" and two.", "</think>", "Four"]),
        ({"content": "."}, [".", ""]),
    )
    page = with_key(context, locked_url)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    answer = ask(page)
    wait_for_end(page)
    steps = answer.locator(".reasoning .step")
    assert "".join(steps.all_text_contents()) == "<think>Two and two.</think>"
    assert "".join(answer.locator("> .step").all_text_contents()) == "Four."
    assert "in 4 forward passes" in page.locator(".answer-end").inner_text()
    steps.first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "Four"
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "popover"
    for block in (answer.locator(".reasoning > .step"), answer.locator("> .step")):
        assert block.and_(page.locator("[tabindex='0']")).count() == 1
    answer.locator(".reasoning summary").click()
    assert not steps.first.is_visible()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page)
    _, said, _ = sent.value.post_data_json["messages"]
    assert said == {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
    page.close()


@pytest.mark.parametrize("begin", [" ", "<"])
def test_what_is_held_back_at_first_is_no_reasoning(
    context: Any, locked_url: str, begin: str
) -> None:
    """It might have been of a mark; the next step says that it was not."""
    body = streamed(({"content": ""}, [begin]), ({"content": f"{begin}b>"}, ["b>"]))
    page = with_key(context, locked_url)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    answer = ask(page)
    wait_for_end(page)
    assert answer.locator(".reasoning").count() == 0
    assert answer.text_content() == f"{begin}b>"
    page.close()


HM = {"reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("steps", "thought", "said"),
    [
        (
            [
                ({"content": "Hi."}, ["Hi."]),
                (HM, ["<|end|>", "Hm."]),
                ({}, ["<|end|>"]),
                ({"content": "Four."}, ["Four."]),
                ({"content": "Five."}, ["Five."]),
            ],
            "<|end|>Hm.<|end|>",
            "Hi.Four.Five.",
        ),
        (
            [
                (HM, ["Hm."]),
                ({}, ["<|end|>"]),
                ({"content": "a"}, ["a"]),
                ({"content": ">\n"}, [">", "\n", "<"]),
                ({"content": "<b"}, ["b"]),
            ],
            "Hm.<|end|>",
            "a>\n<b",
        ),
        (
            [
                (HM, ["Hm."]),
                ({}, ["<|end|>"]),
                ({"content": "One."}, ["One."]),
                ({}, ["<|end|>", "<|final|>"]),
                ({"content": "Two."}, ["Two."]),
            ],
            "Hm.<|end|><|end|><|final|>",
            "One.Two.",
        ),
        ([({}, ["<|final|>"]), ({"content": "Hello"}, ["Hello"])], "", "Hello"),
    ],
    ids=["after text", "held back", "between texts", "none"],
)
def test_reasoning_is_what_the_server_says(
    context: Any, locked_url: str, steps: Any, thought: str, said: str
) -> None:
    """It may come after text, as of gpt-oss; marks are no text of the answer."""
    page = with_key(context, locked_url)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=streamed(*steps)))
    answer = ask(page)
    wait_for_end(page)
    assert "".join(answer.locator(".reasoning .step").all_text_contents()) == thought
    assert answer.locator(".reasoning").count() == bool(thought)
    assert "".join(answer.locator("> .step").all_text_contents()) == said
    page.close()


def test_the_server_counts_drafts_that_it_does_not_show(context: Any, locked_url: str) -> None:
    """As it does where no rejected draft is to be seen."""
    texts = [["a", "b", "c"], *[["d"]] * 9]
    accepted = {"text": "a", "source": "model", "parent": -1, "accepted": True}
    steps = [({"content": "".join(each)}, each) for each in texts]
    counted = {"mean_acceptance_length": 1.2, "num_spec_steps": 10}
    last = {"choices": [], "metrics": {"speculative_decoding": counted}}
    body = streamed(*steps, drafts=[[accepted], *[[]] * 9], last=last)
    page = with_key(context, locked_url)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    ask(page)
    wait_for_end(page)
    assert page.locator("#chat-meter dd").nth(1).inner_text() == "1.20"
    page.close()


@pytest.mark.parametrize("sign", ["\u200b", "\u2019", "\u00e9"])
def test_what_no_key_can_have_is_told(context: Any, locked_url: str, sign: str) -> None:
    """A browser cannot send it, which is no fault of the server."""
    page = context.new_page()
    page.goto(locked_url)
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key", exact=True).fill(f"{KEY}{sign}x")
    dialog.get_by_role("button", name="Use it").click()
    dialog.get_by_text("something else was pasted with it").wait_for()
    assert page.evaluate("sessionStorage.length") == 0
    use_key(page)
    page.close()


def test_a_proxy_is_sent_its_cookie(context: Any, locked_url: str) -> None:
    """It has let the user load the page, too."""
    context.add_cookies([{"name": "proxy", "value": "signed-in", "url": locked_url}])
    page = context.new_page()
    with page.expect_request("**/v1/models") as asked:
        page.goto(locked_url)
    assert asked.value.all_headers()["cookie"] == "proxy=signed-in"
    page.close()
    context.clear_cookies()


def test_text_from_right_to_left(context: Any, locked_url: str) -> None:
    """A paragraph begins where its language does."""
    question = "\u05de\u05d4 \u05e9\u05dc\u05d5\u05de\u05da?"
    body = streamed(({"content": question}, [question]))
    page = with_key(context, locked_url)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    ask(page, question)
    wait_for_end(page)
    where = """element => {
        const range = document.createRange();
        range.selectNodeContents(element);
        return range.getBoundingClientRect().right - element.getBoundingClientRect().right;
    }"""
    assert page.locator(".answer").evaluate(where) == pytest.approx(0, abs=1)
    page.close()


def streamed(
    *steps: tuple[dict[str, str], list[str]],
    drafts: Sequence[list[dict[str, Any]]] = (),
    last: Mapping[str, Any] | None = None,
) -> str:
    """The body of an answer: of each step the delta, the texts of its tokens, and its draft; and a
    chunk behind them."""
    chunks: list[Mapping[str, Any]] = [
        {
            "choices": [
                {
                    "delta": delta,
                    "token_sources": [{"text": text, "source": "plain"} for text in texts],
                    "draft": draft,
                }
            ]
        }
        for (delta, texts), draft in zip_longest(steps, drafts, fillvalue=[])
    ]
    events = (f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, *([last] if last else [])])
    return "".join(events) + LAST_EVENT


def first_of(held: list[Any], page: Any) -> Any:
    """The first request that is held, once there is one; it is held no longer."""
    for _ in range(TIMEOUT_MS // 20):
        if held:
            return held.pop(0)
        page.wait_for_timeout(20)
    raise AssertionError("nothing is asked for")


def test_what_is_refused_takes_nothing_along(context: Any, locked_url: str) -> None:
    """A question that is refused leaves the conversation as it was, and so does a second answer;
    what has been typed since stays."""
    held: list[Any] = []
    page = with_key(context, locked_url)
    page.route("**/v1/chat/completions", lambda route: held.append(route))

    def respond(text: str = "") -> None:
        route = first_of(held, page)
        if text:
            route.fulfill(body=streamed(({"content": text}, [text])))
        else:
            route.fulfill(status=429, json={"error": {"message": "The queue is full."}})
        page.locator("#send:visible").wait_for()

    def shown() -> list[str]:
        return page.locator(".asked, .answer").all_inner_texts()

    ask(page, "A")
    respond("one")
    ask(page, "B")
    page.get_by_label("Message").fill("C")
    respond()
    assert shown() == ["A", "one"]
    assert page.get_by_label("Message").input_value() == "B\n\nC"
    again = page.get_by_role("button", name="Regenerate")
    again.click()
    respond()
    assert shown() == ["A", "one"]
    assert page.locator("#chat-meter dd").nth(2).inner_text() == "1"
    again.click()
    respond("two")
    assert shown() == ["A", "two"]
    ask(page, "B")
    sent = first_of(held, page).request.post_data_json["messages"]
    assert [message["content"] for message in sent] == ["A", "two", "B"]
    page.close()


def test_the_focus_stays_where_the_controls_are(context: Any, locked_url: str) -> None:
    """Of those that take turns the one that is there has it."""
    held: list[Any] = []
    page = with_key(context, locked_url)
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    focused = "document.activeElement.id"
    page.get_by_label("Message").fill("A")
    page.get_by_role("button", name="Send").press("Enter")
    assert page.evaluate(focused) == "stop"
    page.keyboard.press("Enter")
    page.locator("#send:visible").wait_for()
    assert page.evaluate(focused) == "send"
    page.close()


def test_the_list_of_models_is_asked_for_again(context: Any, locked_url: str) -> None:
    """Before a question where there is none yet, and when the server does not know the model."""
    page = context.new_page()
    page.route("**/v1/models", lambda route: route.abort())
    page.goto(locked_url)
    page.locator("#status.is-bad", has_text="The server cannot be reached.").wait_for()
    page.unroute("**/v1/models")
    page.evaluate(f"sessionStorage.setItem('hdserve-key', '{KEY}')")
    unknown = {"status": 404, "json": {"error": {"message": "There is no such model."}}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**unknown))
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page)
    assert sent.value.post_data_json["model"] == MODELS[0]
    page.locator("#status.is-bad", has_text="There is no such model.").wait_for()
    with page.expect_response("**/v1/models"):
        page.get_by_role("button", name="Send").click()
    page.close()


def test_a_race_of_which_one_is_refused(context: Any, locked_url: str) -> None:
    """Its lane says so while the other one runs; the reason is gone with the next race."""
    page = with_key(context, locked_url)
    held: list[Any] = []
    refused = {"status": 429, "json": {"error": {"message": "The queue is full."}}}

    def answer(route: Any) -> None:
        if route.request.post_data_json["speculation"]["enabled"]:
            held.append(route)
        else:
            route.fulfill(**refused)

    page.route("**/v1/chat/completions", answer)
    page.get_by_role("tab", name="Side by side").click()
    page.get_by_role("button", name="Race").click()
    page.locator("#lane-plain .answer-end", has_text="The queue is full.").wait_for()
    assert page.get_by_role("button", name="Stop").is_visible()
    first_of(held, page).fulfill(**refused)
    page.locator("#status.is-bad", has_text="The queue is full.").wait_for()
    texts = iter(["one", "two"])
    page.unroute("**/v1/chat/completions")

    def differ(route: Any) -> None:
        text = next(texts)
        route.fulfill(body=streamed(({"content": text}, [text])))

    page.route("**/v1/chat/completions", differ)
    page.route("**/v1/models/*", lambda route: route.fulfill(**refused))
    page.get_by_role("button", name="Race").click()
    page.locator("#verdict", has_text="is not known: The queue is full.").wait_for()
    assert page.locator("#status").inner_text() == ""
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
    half = "Half\n" * 100
    body = streamed(({"content": half}, [half])).removesuffix(LAST_EVENT)
    page = with_key(context, locked_url)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    answer = ask(page)
    wait_for_end(page)
    said = page.locator("#status.is-bad", has_text="The answer broke off.")
    said.wait_for()
    assert answer.text_content() == half
    assert page.locator(".answer-end").inner_text().endswith("failed: The answer broke off.")
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    assert page.evaluate("scrollY") > 0
    assert said.bounding_box()["y"] >= 0
    page.reload()
    page.locator("#model option").first.wait_for(state="attached")
    page.get_by_role("tab", name="Side by side").click()
    page.get_by_role("button", name="Race").click()
    said.wait_for()
    assert page.locator("#verdict").inner_text() == ""
    ends = page.locator(".lanes .answer-end").all_inner_texts()
    assert ends == ["failed: The answer broke off."] * 2
    page.close()


def test_whoever_reads_the_beginning_stays_there(context: Any, locked_url: str) -> None:
    """The page follows an answer whose end is in view, and no other; the field is always there."""
    page = with_key(context, locked_url)
    page.evaluate(
        """() => {
            const { readable, writable } = new TransformStream();
            window.writer = writable.getWriter();
            window.fetch = async () => new Response(readable);
        }"""
    )
    answer = ask(page)
    lines = "A line.\n" * 100
    more = streamed(({"content": lines}, [lines])).removesuffix(LAST_EVENT)
    write = "text => { window.writer.write(new TextEncoder().encode(text)) }"
    page.evaluate(write, more)
    answer.locator(".step").first.wait_for()
    assert page.evaluate("scrollY") > 0
    page.evaluate("scrollTo(0, 0)")
    page.evaluate(write, more)
    answer.locator(".step").nth(1).wait_for()
    page.evaluate(write, LAST_EVENT)
    wait_for_end(page)
    assert page.evaluate("scrollY") == 0
    assert page.get_by_label("Message").evaluate(
        "field => field.getBoundingClientRect().bottom < innerHeight"
    )
    page.close()


def series(engine: str, entries: int) -> str:
    """Metrics of one replica of the first model."""
    labels = f'model_name="{MODELS[0]}",engine="{engine}"'
    return (
        f"hdserve_slots{{{labels}}} 16\n"
        f'hdserve_database_entries{{{labels},database="model"}} {entries}\n'
        f'hdserve_database_entries{{{labels},database="context"}} {entries}\n'
        f'hdserve_draft_tokens_total{{{labels},source="other"}} 2\n'
    )


def test_no_replica_is_asked_to_describe_itself_twice(context: Any, locked_url: str) -> None:
    """Nor one of a model that has none; figures do not wait for it.  Others are asked anew."""
    held: list[Any] = []
    metrics = [series("r1", 3)]
    page = context.new_page()
    page.clock.install()
    page.route("**/metrics", lambda route: route.fulfill(body="".join(metrics)))
    page.route("**/v1/models/*", lambda route: held.append(route))
    page.goto(locked_url)
    use_key(page)
    page.get_by_role("tab", name="Databases").click()
    region = page.get_by_role("region", name=f"Databases of {MODELS[0]}")
    assert region.locator("tbody tr", has_text="context").locator("td").first.inner_text() == "3"
    assert region.locator("tbody th").last.inner_text() == "other"
    page.get_by_text("no replica runs").wait_for()

    region.focus()
    metrics.append(series("r2", 4))

    def look_again() -> None:
        with page.expect_response("**/metrics"):
            page.clock.run_for(2_000)

    look_again()
    region.locator("tbody tr", has_text="context").locator("td", has_text="7").wait_for()
    assert region.locator("tbody tr", has_text="model").locator("td").first.inner_text() == "4"
    assert region.evaluate("region => region === document.activeElement")
    look_again()
    look_again()
    assert len(held) == 2
    assert {route.request.url.rpartition("/")[2] for route in held} == {MODELS[0]}
    last = held.pop()
    held.clear()
    last.fulfill(status=503, json={})
    page.get_by_text("no replica answers").wait_for()
    look_again()
    first_of(held, page)
    page.close()


def test_models_are_listed_without_metrics(context: Any, locked_url: str) -> None:
    """As behind a proxy that passes the page and the API alone; figures come when it does."""
    page = context.new_page()
    page.clock.install()
    page.route("**/metrics", lambda route: route.fulfill(status=403, body="no"))
    page.goto(locked_url)
    use_key(page)
    page.get_by_role("tab", name="Databases").click()
    told = page.get_by_text("GET /metrics has no figures")
    told.wait_for()
    assert page.locator(".served h2").all_inner_texts() == MODELS
    assert page.get_by_role("table").count() == 0
    assert not page.get_by_role("dialog", name="API key").is_visible()
    page.unroute("**/metrics")
    page.route("**/metrics", lambda route: route.fulfill(body=series("r1", 3)))
    page.clock.run_for(2_000)
    page.get_by_role("table").first.wait_for()
    assert not told.is_visible()
    page.close()


def test_what_is_told_of_a_key_that_is_no_longer_used(context: Any, locked_url: str) -> None:
    """The question for the key is not asked again by a late refusal, nor what is typed replaced;
    the reason goes with the refusal."""
    page = with_key(context, locked_url)
    dialog = page.get_by_role("dialog", name="API key")
    field = dialog.get_by_label("Key", exact=True)
    held: list[Any] = []
    page.route("**/v1/models", lambda route: held.append(route))

    def use(key: str) -> None:
        page.get_by_role("button", name="Key").click()
        field.fill(key)
        with page.expect_request("**/v1/models"):
            dialog.get_by_role("button", name="Use it").click()

    def refuse(route: Any) -> None:
        with page.expect_response("**/v1/models"):
            route.continue_()

    use("wrong")
    page.get_by_role("button", name="Key").click()
    field.fill("half a ke")
    refuse(first_of(held, page))
    reason = page.locator("#key-reason")
    page.locator("#key-reason:not(:empty)").wait_for()
    assert field.input_value() == "half a ke"
    assert dialog.get_by_text("Kept in this tab").is_visible()
    dialog.get_by_role("button", name="Cancel").click()

    use("wrong-too")
    late = first_of(held, page)
    use(KEY)
    valid = first_of(held, page)
    with page.expect_response("**/v1/models"):
        valid.continue_()
    refuse(late)
    page.wait_for_timeout(100)
    assert not dialog.is_visible()
    assert page.locator("#status").inner_text() == ""
    page.get_by_role("button", name="Key").click()
    assert reason.inner_text() == ""
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

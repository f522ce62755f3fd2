"""Requests and programs that the documents show, against a real server."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import warnings
from typing import Any

import pytest

from tests.deployments.http.page import QUESTION
from tests.documents import ROOT, commands, shell_commands, texts
from tests.serving import ServedApplication

pytestmark = pytest.mark.ray

MODELS = ["hdserve-tiny", "hdserve-mini"]


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
    """Each ``curl`` is answered; those of the administrator are in ``test_api_end_to_end``."""
    asked = [words for words in shell_commands() if words[0] == "curl"]
    found = [words for words in asked if "HDSERVE_ADMIN_KEY" not in " ".join(words)]
    assert len(found) == 2
    for words in found:
        assert answer_of(words, application)["choices"][0]["message"]["content"]


def test_the_programs_of_the_documents(
    application: ServedApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    """They print an answer; those of the quick start, and the example, also what was accepted, or
    each token's source."""
    quick, readme = (
        shown(page, "python", "OpenAI") for page in ("docs/quickstart.md", "README.md")
    )
    messages = shown("docs/http.md", "python", "Anthropic")
    example = (ROOT / "examples" / "stream_client.py").read_text(encoding="utf-8")
    assert (len(quick), len(readme), len(messages)) == (2, 1, 1)
    for program in (*quick, example, *readme, *messages):
        assert "http://localhost:8000" in program
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # a script's client ends with it
            exec(program.replace("http://localhost:8000", application.base_url), {"__name__": "it"})
            gc.collect()
        printed = capsys.readouterr().out
        assert printed.count("\n") >= 2 if program in (*quick, example) else printed


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

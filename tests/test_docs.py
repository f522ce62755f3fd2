"""What the documentation shows works, is complete and leads somewhere."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pydantic import BaseModel
from typer.testing import CliRunner

from deployments.gateway import Gateway
from deployments.http.completion_routes import MAX_ECHO_CHARACTERS
from deployments.http.routes import build_api
from deployments.openai.messages import MAX_MESSAGES
from deployments.openai.protocol import (
    MAX_ANSWERS,
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    Speculation,
    StreamOptions,
    TokenizeBody,
)
from deployments.openai.request_body import UNSUPPORTED_EXTENSIONS
from deployments.openai.responses_protocol import ResponsesBody
from deployments.openai.tools import MAX_TOOLS
from deployments.replica.answer_logprobs import MAX_ANSWER_LOGPROBS
from deployments.replica.sequence_builder import MAX_PROMPT_IDS, MAX_PROMPT_LOGPROBS
from hdserve.bench.replay_files import read_replay
from hdserve.cli.commands import app as command
from hdserve.config import default_config
from hdserve.core import (
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
)
from tests.documents import ROOT, measured, texts
from tests.engines import make_engine, make_sequence, plain_tokens, run
from tests.models import make_model
from tools.config_reference import reference
from tools.metrics_reference import metrics_reference

DOCS = sorted((ROOT / "docs").rglob("*.md"))
GUIDES = sorted((ROOT / "docs").glob("*.md"))
LINKED = [*sorted(ROOT.glob("*.md")), *DOCS]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def parsed(path: Path) -> list[Token]:
    return MarkdownIt().parse(read(path))


def links(path: Path) -> Iterator[str]:
    """To where those of a page lead, but those into the web."""
    for token in parsed(path):
        for part in token.children or ():
            target = str(part.attrs.get("href", part.attrs.get("src", "")))
            if target and not urlsplit(target).scheme:
                yield target


@cache
def anchors(path: Path) -> frozenset[str]:
    """Those that GitHub gives the headings of a page."""
    found, counts = set[str](), Counter[str]()
    for before, token in pairwise(parsed(path)):
        if before.type == "heading_open":
            parts = token.children or ()
            title = "".join(part.content for part in parts if part.type in {"text", "code_inline"})
            name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            found.add(f"{name}-{counts[name]}" if counts[name] else name)
            counts[name] += 1
    return frozenset(found)


def leads_somewhere(path: Path, target: str) -> bool:
    """To a file or directory, and if it is a page, to a heading of it."""
    name, _, anchor = target.partition("#")
    place = path.parent / name if name else path
    return place.exists() and (not anchor or place.suffix != ".md" or anchor in anchors(place))


def test_links_lead_somewhere() -> None:
    found = [(path, target) for path in LINKED for target in links(path)]
    assert len(found) > 400
    assert [
        f"{path.relative_to(ROOT)}: {target}"
        for path, target in found
        if not leads_somewhere(path, target)
    ] == []


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = ["# What `a_b` is, *now*: 1.5 & C++ - Ü", "## Keys", "Keys\n----", "```\n# No\n```"]
    page.write_text("\n\n".join(text), encoding="utf-8")
    assert anchors(page) == {"what-a_b-is-now-15--c---ü", "keys", "keys-1"}
    assert leads_somewhere(page, "#keys-1")
    assert leads_somewhere(page, "page.md#keys")
    assert not leads_somewhere(page, "#keys-2")
    assert not leads_somewhere(page, "pages.md")


def test_the_readme_names_every_guide() -> None:
    readme = read(ROOT / "README.md")
    assert [path.name for path in GUIDES if f"](docs/{path.name})" not in readme] == []


def test_the_configuration_reference_is_current() -> None:
    """``python -m tools.config_reference > docs/configuration.md`` writes it."""
    assert read(ROOT / "docs" / "configuration.md") == reference()


def test_the_metrics_reference_is_current() -> None:
    """``python -m tools.metrics_reference > docs/metrics.md`` writes it."""
    assert read(ROOT / "docs" / "metrics.md") == metrics_reference()


def test_every_refused_parameter_is_told() -> None:
    """Those of other servers, and those of chats, completions and ``/tokenize``."""
    _, _, refused = read(ROOT / "docs" / "http.md").partition("## Refused parameters")
    told = set(re.findall(r"`([a-z_]+)`", refused.partition("\n## ")[0]))
    wanted = UNSUPPORTED_EXTENSIONS.keys() - ChatBody.model_fields.keys()
    for body in (ChatBody, CompletionBody, TokenizeBody):
        wanted |= body.unsupported.keys()
    assert wanted - told == set()


def test_every_field_is_explained() -> None:
    """No row of the configuration reference lacks its sentence."""
    assert re.findall(r"^\|.*\|\s*\|$", reference().replace("| |\n|---", ""), re.MULTILINE) == []


def test_figures_of_drafting_agree() -> None:
    """Those that several tables have, of Spec-Bench with all databases, warm, at 16 nodes."""
    results, tuning = read(ROOT / "docs/results/drafting.md"), read(ROOT / "docs/tuning.md")
    (row,) = re.findall(
        r"^\| specbench-vicuna-7b \| C\+M\+S \| 16 \| (.*) \|$", results, re.MULTILINE
    )
    warm = row.split(" | ")[2]
    alone = re.findall(r"^\| (\S+) \| 16 \| \S+ \| (\S+) \|$", results, re.MULTILINE)
    figures = {name: f"{float(figure):.2f}" for name, figure in alone}
    assert dict(alone)["hierarchy"] == warm
    names = ("context", "model", "statistics")
    told = ", ".join(f"{name} {figures[name]}" for name in names)
    assert f"warm, at 16: {told}, all three together {float(warm):.2f}." in tuning


@pytest.mark.parametrize("model", ["hdserve-tiny", "hdserve-mini"])
@pytest.mark.parametrize("page", ["engine-amx.md", "engine-zen4.md"])
def test_figures_of_the_engine_agree(page: str, model: str) -> None:
    """Those of the overview of all processors are those of its own page."""
    cold, warm = (
        measured(f"docs/results/{page}", f"{state}, batch 1", model) for state in ("Cold", "Warm")
    )
    rates = {name: int(rate) for name, (rate, _) in cold.items()}
    ratios = [
        f"{rates['autoregressive'] / rates['transformers']:.1f}",
        cold["hierarchy"][1],
        warm["hierarchy"][1],
        f"{rates['hierarchy'] / rates['transformers-prompt-lookup']:.1f}",
    ]
    overview = read(ROOT / "docs/results/engine.md")
    (found,) = re.findall(rf"^\| .*{page}.*$(?:\n\| \| .*$)?", overview, re.MULTILINE)
    assert f"{model}, bfloat16 | {' | '.join(ratios)} |" in found


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_commands_exist(path: Path) -> None:
    """Each ``hdserve`` command and option a guide shows is one."""
    from typer.main import get_command

    shown = re.sub(r"\\\n", " ", read(path))
    for line in re.findall(r"(?:^|`)hdserve ([a-z][^`#\n]*)", shown, re.MULTILINE):
        current: Any = get_command(command)
        words = line.split()
        while hasattr(current, "commands") and words:
            assert words[0] in current.commands, line
            current = current.commands[words.pop(0)]
        known = {option for item in current.params for option in item.opts + item.secondary_opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_every_route_is_documented() -> None:
    """And no other is."""
    api = build_api(Gateway(default_config(), {}))
    routes = {
        f"{method.upper()} {path}"
        for path, methods in api.openapi()["paths"].items()
        for method in methods
    }
    documented = set(re.findall(r"`((?:GET|POST|PUT|DELETE) /[^`]*)`", read(ROOT / "docs/http.md")))
    pages = {"GET /", "GET /playground"}
    assert {route.replace(":path", "") for route in routes} == documented - pages


@pytest.mark.parametrize("model", [ChatBody, CompletionBody, Speculation, StreamOptions])
def test_every_parameter_is_documented(model: type[BaseModel]) -> None:
    assert undocumented(model, read(ROOT / "docs/http.md")) == []


@pytest.mark.parametrize(
    "limit",
    [
        f"are at most {MAX_PROMPT_LOGPROBS:,} in a request",
        f"may have {MAX_ANSWER_LOGPROBS:,} log probabilities",
        f"token ids of prompts, {MAX_PROMPT_IDS:,} at most",
        f"`echo` {MAX_ECHO_CHARACTERS:,} characters",
        f"answers per prompt, up to {MAX_CHOICES}, and {MAX_ANSWERS} to all prompts",
        f"up to {MAX_LOGIT_BIASES} token ids",
        f"up to {MAX_MESSAGES} of `system`",
        f"`tools` (up to {MAX_TOOLS})",
        f"up to {MAX_STOP_STRINGS} texts of up to {MAX_STOP_CHARACTERS} characters",
        f"`top_logprobs` (up to {MAX_TOP_LOGPROBS})",
    ],
)
def test_limits_of_requests_are_documented(limit: str) -> None:
    assert limit in read(ROOT / "docs/http.md").replace("\n", " ")


def test_every_parameter_of_the_responses_api_is_documented() -> None:
    """In the section about it."""
    (section,) = re.findall(
        r"^## Responses\n(.*?)^## ", read(ROOT / "docs/http.md"), re.MULTILINE | re.DOTALL
    )
    assert undocumented(ResponsesBody, section) == []


def undocumented(model: type[BaseModel], text: str) -> list[str]:
    return [name for name in model.model_fields if f"`{name}`" not in text]


def test_the_draft_source_drafts() -> None:
    """The class of the guide guesses right, and changes nothing."""
    program, _ = texts("docs/adding-a-draft-source.md", "python")
    names: dict[str, Any] = {"__name__": "example"}
    exec(program, names)
    drafter = names["PhraseDrafter"]()
    model = make_model()
    seq = make_sequence("a", [3, 9, 4] * 4, logit_bias={7: 100.0}, temperature=0.0)
    wanted = plain_tokens(model, [seq])["a"]
    run(make_engine([drafter], model=model), [seq])
    assert seq.token_ids == wanted
    assert seq.counts.num_accepted_tokens > 10
    assert drafter._next == {}


def test_what_the_guide_records_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts and answers, in the order of the prompts; with the smaller model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "A taxi"}\n{"prompt": "A train"}\n')
    _, program = texts("docs/adding-a-draft-source.md", "python")
    exec(program.replace("hdserve-tiny", "hdserve-mini"), {"__name__": "example"})
    rows = list(read_replay("recorded.jsonl"))
    assert [row.name for row in rows] == ["0", "1"]
    assert all(row.prompt and row.response for row in rows)
    arguments = ["bench", "replay", "--eval", "recorded.jsonl", "--mode", "online", "--json"]
    outcome = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0


def test_the_offline_program_of_the_quick_start(capsys: pytest.CaptureFixture[str]) -> None:
    """The second answer takes fewer steps."""
    (program,) = [block for block in texts("docs/quickstart.md", "python") if "LLM(" in block]
    exec(drafting_always(program), {"__name__": "example"})
    first, again = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["first", again.split()[1]]
    assert int(again.split()[4]) < int(first.split()[4])


def test_the_offline_example(capsys: pytest.CaptureFixture[str]) -> None:
    """The second answer is the first again, in fewer steps; with the smaller model."""
    program = drafting_always(read(ROOT / "examples" / "offline.py"))
    exec(program.replace("hdserve-tiny", "hdserve-mini"), {"__name__": "example"})
    first, counts, again, counts_again = capsys.readouterr().out.splitlines()
    assert first.removeprefix("first: ") == again.removeprefix("again: ")
    assert counts.split()[:3] == counts_again.split()[:3]
    assert int(counts_again.split()[3]) < int(counts.split()[3])


def drafting_always(program: str) -> str:
    """A program that drafts even if drafts do not pay, as on a busy machine, or while the model is
    compiled."""
    made = 'LLM("hdserve-tiny"'
    assert made in program
    options = "engine={'compile': False}, drafting={'adapts_budget': False}"
    return program.replace(made, f"{made}, {options}")


def test_the_programs_of_offline_use(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as they are read; with the smaller model."""
    programs = "\n".join(texts("docs/offline.md", "python"))
    programs = programs.replace("hdserve-tiny", "hdserve-mini")
    names: dict[str, Any] = {"__name__": "example"}
    exec(programs, names)
    first, second, answer, *form, streamed, last = capsys.readouterr().out.splitlines()
    assert first.split()[-2] in {"length", "stop"}
    assert second != first
    assert streamed.startswith(answer)  # a stream ends without a new line
    assert {streamed.removeprefix(answer)[0], last[0]} == {"0", "1"}
    assert json.loads("\n".join(form))["city"] in {"San Jose", "Cambridge"}
    for found, most in zip(names["answers"], (40, 20), strict=True):
        assert len(found.token_ids) <= most
    assert len(names["several"]) == 3

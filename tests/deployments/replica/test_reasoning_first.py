"""Answers that are held to a form, of a model that reasons: from the request to its records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.generation import Delta, GenerationRequest, Summary
from deployments.off_loop import OffLoop
from deployments.parsers.reasoning_parsers import ThinkParser
from deployments.parsers.tool_parser import Function
from deployments.parsers.tool_parsers import HermesToolParser
from deployments.replica.reasoning_reader import ReasoningReaders
from deployments.replica.record_builder import RecordBuilder
from deployments.replica.sequence_builder import SequenceBuilder
from hdserve import core, grammar
from hdserve.config import ModelConfig
from hdserve.engine.host import ModelHost
from hdserve.engine.tokenization.tokenizer import Tokenizer
from hdserve.models import bundled_model_path
from tests.engines import run
from tests.reasoning import with_think_marks

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% elif opens is true %}<think>
{% endif %}"""

CHAT = ({"role": "user", "content": "I want to book a table for two in San Jose."},)
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["San Jose", "Seoul"]}}}
SCHEMA |= {"required": ["city"], "additionalProperties": False}
FUNCTIONS = [Function("book", SCHEMA)]
CALL = HermesToolParser.grammar(FUNCTIONS, is_one=True)
NUM_CHOICES = 4


class Replica:
    """What a replica makes of requests, in this process.

    Attributes:
        opening, closing: the tokens of the marks.
    """

    def __init__(self, directory: Path, *, is_special: bool) -> None:
        source = bundled_model_path("hdserve-tiny")
        assert source is not None
        shutil.copytree(source, directory / "m")
        self.opening, self.closing = with_think_marks(directory / "m", is_special=is_special)
        template = directory / "reasoning.jinja"
        template.write_text(TEMPLATE)
        config = {
            "name": "m",
            "model": str(directory / "m"),
            "chat_template": str(template),
            "drafting": {"adapts_budget": False},
            "engine": {"dtype": "float32", "exact": True, "compile": False},
        }
        self.host = ModelHost(ModelConfig.model_validate(config))
        self._readers = ReasoningReaders(ThinkParser, self.host.tokenizer)
        self._builder = SequenceBuilder(self.host, OffLoop())
        self._engine = self.host.make_engine()

    def answer(
        self, request: GenerationRequest
    ) -> tuple[list[core.Sequence], list[list[Delta]], Summary]:
        """The sequences of a request, what each gives, and the summary."""
        request = self._readers.prepared(request, self._builder.chat_text)
        sequences = self._builder.build(request)
        readers = self._readers.of(request, sequences)
        records = RecordBuilder(self.host.tokenizer, "replica")
        outputs = run(self._engine, sequences)
        found: list[list[Delta]] = [[] for _ in sequences]
        for delta in records.deltas(outputs, readers, includes_sources=True):
            found[delta.choice_index].append(delta)
        return sequences, found, records.summary(request, sequences, (), readers.values())


@pytest.fixture(scope="module", params=[False, True], ids=["plain marks", "special marks"])
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Replica:
    return Replica(tmp_path_factory.mktemp("model"), is_special=request.param)


def asked(
    replica: Replica, form: str, options: Mapping[str, Any], **sampling: Any
) -> GenerationRequest:
    """Of a model that soon opens and closes its reasoning, where it may."""
    biases = {replica.opening: 40.0, replica.closing: 43.0}
    chosen = {"temperature": 1.0, "seed": 5, "max_tokens": 120, "logit_bias": biases}
    return GenerationRequest(
        "r",
        messages=CHAT,
        template_options=options,
        sampling={**chosen, "skip_special_tokens": False, "grammar": form, **sampling},
        num_choices=NUM_CHOICES,
    )


def joined(deltas: list[Delta]) -> tuple[str | None, str]:
    """Reasoning and text of a choice."""
    parts = [delta.reasoning for delta in deltas if delta.reasoning is not None]
    return "".join(parts) if parts else None, "".join(delta.text for delta in deltas)


def check_said(form: str, text: str) -> None:
    if form != CALL:
        assert json.loads(text)["city"] in ("San Jose", "Seoul")
        return
    parser = HermesToolParser(FUNCTIONS)
    begin, *arguments = [*parser.push(text), *parser.finish()]
    assert not isinstance(begin, str)
    assert all(not isinstance(part, str) for part in arguments)


@pytest.mark.parametrize("options", [{}, {"opens": True}], ids=["model opens", "prompt opens"])
@pytest.mark.parametrize("form", [grammar.json_schema(SCHEMA), CALL], ids=["schema", "call"])
def test_the_form_is_that_of_what_follows_the_reasoning(
    replica: Replica, form: str, options: dict[str, Any]
) -> None:
    """With drafts, some of which go past the mark, and without, which give the same."""
    request = asked(replica, form, options)
    sequences, found, summary = replica.answer(request)
    plain, _, _ = replica.answer(replace(request, speculation={"is_enabled": False}))
    assert [seq.token_ids for seq in sequences] == [seq.token_ids for seq in plain]
    num_reasoning_tokens = num_whole = 0
    for seq, deltas in zip(sequences, found, strict=True):
        reasoning, text = joined(deltas)
        assert reasoning is not None
        assert "think>" not in text
        if deltas[-1].finish_reason == "stop":
            num_whole += 1
            check_said(form, text)
        written = [*seq.output_token_ids, replica.closing]
        num_reasoning_tokens += min(written.index(replica.closing) + 1, seq.num_output_tokens)
        assert (seq.output_token_ids[0] == replica.opening) is not bool(options)
    assert num_whole > 0
    assert summary.num_reasoning_tokens == num_reasoning_tokens
    assert summary.drafts.num_accepted_tokens > 0


def test_the_prompt_is_made_once(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what it says of reasoning is looked at before its tokens are."""
    made = []
    render = Tokenizer.render_chat

    def noted(*arguments: Any) -> str:
        made.append(render(*arguments))
        return made[-1]

    monkeypatch.setattr(Tokenizer, "render_chat", noted)
    sequences, _, _ = replica.answer(asked(replica, CALL, {"opens": True}, max_tokens=1))
    (prompt,) = made
    token_ids = replica.host.tokenizer.encode(prompt, adds_special_tokens=False)
    assert sequences[0].token_ids[: len(token_ids)] == token_ids


def test_reasoning_may_take_all_tokens(replica: Replica) -> None:
    """Then nothing is said."""
    biases = {replica.closing: -100.0}
    options = {"max_tokens": 7, "logit_bias": biases}
    request = asked(replica, grammar.json_schema(SCHEMA), {"opens": True}, **options)
    _, found, summary = replica.answer(request)
    for deltas in found:
        reasoning, text = joined(deltas)
        assert reasoning
        assert text == ""
        assert deltas[-1].finish_reason == "length"
    assert summary.num_reasoning_tokens == 7 * NUM_CHOICES


@pytest.mark.parametrize("form", [grammar.json_schema(SCHEMA), CALL], ids=["schema", "call"])
def test_without_reasoning_the_form_holds_from_the_first_token_on(
    replica: Replica, form: str
) -> None:
    """Where the prompt has closed it, whatever the model would rather write, and where the model
    does not open it."""
    biases = {replica.opening: 100.0, replica.closing: 100.0}
    for options, chosen in (({"enable_thinking": False}, biases), ({}, {replica.opening: -100.0})):
        _, found, summary = replica.answer(asked(replica, form, options, logit_bias=chosen))
        for deltas in found:
            reasoning, text = joined(deltas)
            assert reasoning is None
            check_said(form, text)
        assert not summary.num_reasoning_tokens

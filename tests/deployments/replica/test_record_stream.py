"""The records of a request while it is decoded, by a real engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest

from deployments.generation import Delta, GenerationRequest, Records, Summary
from deployments.metrics.samples import HistogramValue
from deployments.replica import answer_logprobs, record_stream
from deployments.replica.reasoning_reader import ReasoningReaders
from deployments.replica.record_builder import RecordBuilder
from deployments.replica.record_stream import RecordStreams
from deployments.replica.request_metrics import RequestMetrics
from deployments.tracing import GenerationTrace
from hdserve import grammar
from hdserve.core import Sequence
from hdserve.drafting.base import Drafter
from hdserve.engine.async_engine import AsyncEngine
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.tokenization.tokenizer import Tokenizer
from hdserve.errors import InvalidRequest
from hdserve.tree import DraftTree
from tests.drafters import JunkDrafter, OracleDrafter
from tests.engine.async_engines import make, run_async, started
from tests.engine.structured_output.test_grammar import MODEL, TOKENIZER
from tests.engines import make_engine, make_sequence
from tests.models import VOCAB_SIZE

WHOLE = GenerationRequest("r", prompts=((5, 6),), num_choices=2)
NUM_TOKENS = 24
EXPLODING = grammar.regex("(a|b)*a(a|b){40}")
"""Takes too much work after some letters."""


def records(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    request: GenerationRequest,
    waited_s: float = 0.0,
    metrics: RequestMetrics | None = None,
    **params: Any,
) -> AsyncGenerator[Records]:
    """Of two choices of ``NUM_TOKENS`` tokens each, which took ``waited_s`` to build."""
    metrics = metrics or RequestMetrics()
    builder, readers = RecordBuilder(tokenizer, "r1"), ReasoningReaders(None, tokenizer)
    streams = RecordStreams(engine, builder, metrics, readers)
    sequences = [
        make_sequence(f"r/{choice}/0/{choice}", [5, 6], seed=choice, ignore_eos=True, **params)
        for choice in range(request.num_choices)
    ]
    arrived_s = time.monotonic() - waited_s
    return streams.stream(request, sequences, GenerationTrace(None, None, 0), arrived_s)


def test_the_wait_before_a_request_reaches_the_engine_counts(tokenizer: Tokenizer) -> None:
    """For a large body, or for other requests whose grammars are compiled first."""
    waited_s, metrics = 1000.0, RequestMetrics()

    async def test() -> None:
        async with started() as engine:
            found = records(engine, tokenizer, WHOLE, waited_s, metrics)
            summary = [record async for message in found for record in message][-1]
        assert isinstance(summary, Summary)
        assert summary.first_token_s is not None
        assert summary.first_token_s > waited_s

    run_async(test)
    values = {sample.name.removeprefix("vllm:"): sample.value for sample in metrics.samples()}
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        histogram = values[f"{name}_seconds"]
        assert isinstance(histogram, HistogramValue)
        assert histogram.total > 2 * waited_s
    prefill = values["request_prefill_time_seconds"]
    assert isinstance(prefill, HistogramValue)
    assert prefill.total < waited_s


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_whole_answer_ends_where_it_has_too_many_log_probabilities(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_top: int
) -> None:
    """Those of all choices count, and none of a choice is generated any more; one that has as many
    as it may does not end so."""
    most = 2 * NUM_TOKENS * (1 + num_top)

    async def num_tokens(request: GenerationRequest, limit: int) -> int:
        monkeypatch.setattr(answer_logprobs, "MAX_ANSWER_LOGPROBS", limit)
        async with started() as engine:
            try:
                found = [
                    record
                    async for message in records(engine, tokenizer, request, logprobs=num_top)
                    for record in message
                ]
            finally:
                async with asyncio.timeout(10):
                    while engine.num_open:
                        await asyncio.sleep(0.01)
        assert isinstance(found[-1], Summary)
        return sum(len(record.token_ids) for record in found if isinstance(record, Delta))

    async def test() -> None:
        assert await num_tokens(WHOLE, most) == 2 * NUM_TOKENS
        with pytest.raises(InvalidRequest, match=rf"^logprobs: .* {1 + num_top} log") as caught:
            await num_tokens(WHOLE, most - 1)
        assert caught.value.param == "logprobs"

    run_async(test)


class Paced(Drafter):
    """Drafts nothing; a sequence gets on as often as it ``may``."""

    name = "paced"

    def __init__(self) -> None:
        self.may = threading.Semaphore(4)

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        self.may.acquire(timeout=60)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_stream_ends_where_too_many_log_probabilities_wait_to_be_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """One that is read may have more altogether."""
    monkeypatch.setattr(answer_logprobs, "MAX_ANSWER_LOGPROBS", NUM_TOKENS)
    request, paced, found = replace(WHOLE, is_streamed=True), Paced(), list[int]()

    async def read(engine: AsyncEngine) -> None:
        async for message in records(engine, tokenizer, request, logprobs=1):
            while not is_read and engine.num_open:
                paced.may.release()
                await asyncio.sleep(0.001)
            new = [token for item in message if isinstance(item, Delta) for token in item.token_ids]
            paced.may.release(max(1, len(new)))
            found.extend(new)

    async def test() -> None:
        async with started(partial(make, paced)) as engine:
            if is_read:
                await read(engine)
                assert len(found) == 2 * NUM_TOKENS
            else:
                with pytest.raises(InvalidRequest, match=r"^logprobs: .* wait to be read"):
                    await read(engine)

    run_async(test)


def size_but_for_one_record(message: Records, num_top: int) -> int:
    """Tokens, log probabilities and drafts of a message; the largest record does not count."""
    sizes = [
        len(record.draft) + len(record.token_ids) * (1 + num_top)
        for record in message
        if isinstance(record, Delta)
    ]
    return sum(sizes) - max(sizes, default=0)


@pytest.mark.parametrize(("num_top", "shows_drafts"), [(None, False), (3, False), (None, True)])
def test_what_gathers_while_nobody_reads_comes_in_parts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_top: int | None, shows_drafts: bool
) -> None:
    """All of it, in order."""
    monkeypatch.setattr(record_stream, "_MAX_SIZE", 12)
    request = replace(WHOLE, is_streamed=True, includes_sources=shows_drafts)

    async def read(*, waits: bool) -> list[Records]:
        messages = []
        async with started(partial(make, JunkDrafter(VOCAB_SIZE))) as engine:
            async for message in records(engine, tokenizer, request, logprobs=num_top):
                messages.append(message)
                while waits and engine.num_open:
                    await asyncio.sleep(0.01)
        return messages

    def token_ids(messages: list[Records]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {0: [], 1: []}
        for record in chain(*messages):
            if isinstance(record, Delta):
                found[record.choice_index] += record.token_ids
        return found

    async def test() -> None:
        late = await read(waits=True)
        assert token_ids(late) == token_ids(await read(waits=False))
        assert isinstance(late[-1][-1], Summary)
        assert shows_drafts == any(isinstance(r, Delta) and r.draft for r in chain(*late))
        assert max(size_but_for_one_record(message, num_top or 0) for message in late) <= 12

    run_async(test)


def test_what_a_grammar_allowed_before_it_failed_is_told_with_drafts_as_without() -> None:
    """A stream has the same tokens, whichever step they came in."""
    request = replace(WHOLE, num_choices=1, is_streamed=True)

    async def told(*drafters: Drafter) -> list[int]:
        grammars, found = Grammars(TOKENIZER, 260, {256}, step_fuel=200), list[int]()
        options: dict[str, Any] = {"model": MODEL, "tokenizer": TOKENIZER, "grammars": grammars}

        async def read(engine: AsyncEngine) -> None:
            answer = records(engine, TOKENIZER, request, grammar=EXPLODING, max_tokens=80)
            async for message in answer:
                for delta in message:
                    assert isinstance(delta, Delta)
                    assert delta.finish_reason is None
                    found.extend(delta.token_ids)

        async with started(partial(make_engine, drafters, **options)) as engine:
            with pytest.raises(InvalidRequest, match="too complex"):
                await read(engine)
        return found

    async def test() -> None:
        plain = await told()
        assert len(plain) > 5
        assert await told(OracleDrafter({"r/0/0/0": [5, 6, *plain]})) == plain

    run_async(test)

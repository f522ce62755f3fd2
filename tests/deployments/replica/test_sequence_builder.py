"""What the engine is given for a request."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hdserve.engine.structured_output.grammar as grammar_module
from deployments.generation import GenerationRequest
from deployments.off_loop import OffLoop
from deployments.replica.answer_logprobs import MAX_ANSWER_LOGPROBS
from deployments.replica.sequence_builder import MAX_PROMPT_IDS, SequenceBuilder
from hdserve import grammar
from hdserve.config import EngineConfig, ModelConfig
from hdserve.core import Sequence
from hdserve.engine.host import ModelHost
from hdserve.errors import GrammarsOverloaded, InvalidRequest, PromptTooLong
from tests.engines import make_engine, run

CHAT = ({"role": "user", "content": "hi"},)


@pytest.fixture(scope="module")
def host() -> ModelHost:
    return ModelHost(ModelConfig(name="m", model="hdserve-mini"))


def test_each_choice_of_each_prompt_is_a_sequence(host: ModelHost) -> None:
    """In the order of the answer, with ids that say which; a text becomes token ids."""
    request = GenerationRequest(
        "r", prompts=("The restaurant", (5, 6, 7)), num_choices=2, namespace="anna"
    )
    sequences = SequenceBuilder(host, OffLoop()).build(request)
    text_ids = host.tokenizer.encode("The restaurant")
    assert [seq.token_ids for seq in sequences] == [text_ids, text_ids, [5, 6, 7], [5, 6, 7]]
    assert [seq.choice_index for seq in sequences] == [0, 1, 0, 1]
    ends = [seq.request_id.split("/", 2)[2] for seq in sequences]
    assert ends == ["0/0", "0/1", "1/0", "1/1"]
    assert {seq.namespace for seq in sequences} == {"anna"}


def test_a_text_without_tokens_is_the_end_of_another(host: ModelHost) -> None:
    """This tokenizer has no token for the beginning; no ids are what the client wrote."""
    request = GenerationRequest("r", prompts=("", "The restaurant", ()))
    blank, text, no_ids = SequenceBuilder(host, OffLoop()).build(request)
    assert blank.token_ids == [host.tokenizer.eos_token_id]
    assert text.token_ids == host.tokenizer.encode("The restaurant")
    assert no_ids.token_ids == []


def test_each_prompt_draws_its_own_seed(host: ModelHost) -> None:
    """Equal prompts of a request are sampled independently, unless the client gives the seed; the
    choices of one differ by their index."""
    request = GenerationRequest("r", prompts=((5, 6), (5, 6)), num_choices=2)
    seeds = [seq.params.seed for seq in SequenceBuilder(host, OffLoop()).build(request)]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    seeded = replace(request, sampling={"seed": 7})
    assert {seq.params.seed for seq in SequenceBuilder(host, OffLoop()).build(seeded)} == {7}


def test_log_probabilities_of_prompts_are_bounded(host: ModelHost) -> None:
    """Those of all choices together, before anything is computed."""
    sampling = {"logprobs": 7, "prompt_logprobs": 7}
    most = GenerationRequest("r", prompts=((5,) * 1024,), num_choices=16, sampling=sampling)
    assert len(SequenceBuilder(host, OffLoop()).build(most)) == 16
    with pytest.raises(InvalidRequest, match=r"16400 tokens .* 8 log") as caught:
        SequenceBuilder(host, OffLoop()).build(replace(most, prompts=((5,) * 1025,)))
    assert caught.value.param == "logprobs"
    named = replace(most, prompts=((5,) * 1025,), prompt_logprobs_param="prompt_logprobs")
    with pytest.raises(InvalidRequest) as caught:
        SequenceBuilder(host, OffLoop()).build(named)
    assert caught.value.param == "prompt_logprobs"


def test_log_probabilities_of_whole_answers_are_bounded(host: ModelHost) -> None:
    """By what all choices may come to have, if ``max_tokens`` says so; those of a stream are sent
    as they come."""
    longest = host.max_total_tokens
    fits = MAX_ANSWER_LOGPROBS // 64 // 21
    assert MAX_ANSWER_LOGPROBS >= 8 * 1024 * 6
    builder = SequenceBuilder(host, OffLoop())
    sampling = {"logprobs": 20, "max_tokens": fits}
    most = GenerationRequest("r", prompts=((5,),), num_choices=64, sampling=sampling)
    assert len(builder.build(most)) == 64
    more = {**sampling, "max_tokens": fits + 1}
    asked = replace(most, sampling=more)
    with pytest.raises(InvalidRequest, match=r"^logprobs: .* 21 log .* a stream") as caught:
        builder.build(asked)
    assert caught.value.param == "logprobs"
    assert len(builder.build(replace(asked, is_streamed=True))) == 64
    full = ((5,) * (longest - fits),)
    assert len(builder.build(replace(most, prompts=full, sampling=more))) == 64
    assert len(builder.build(replace(most, sampling={"logprobs": 20}))) == 64
    assert len(builder.build(replace(most, sampling={}))) == 64
    unsaid = replace(most, sampling={"logprobs": 20}, api_defaults=more)
    assert len(builder.build(unsaid)) == 64


def test_ids_of_prompts_are_bounded(host: ModelHost) -> None:
    """Where every choice has those of its own; a chat has them once."""
    number = MAX_PROMPT_IDS // 1024
    most = GenerationRequest("r", prompts=((5,) * 1024,), num_choices=number, includes_prompts=True)
    builder = SequenceBuilder(host, OffLoop())
    assert len(builder.build(most)) == number
    more = replace(most, prompts=((5,) * 1025,))
    with pytest.raises(InvalidRequest, match=rf"{1025 * number} tokens of prompts") as caught:
        builder.build(more)
    assert caught.value.param == "return_token_ids"
    assert len(builder.build(replace(more, includes_prompts=False))) == number
    chat = ({"role": "user", "content": "hi " * 800},)
    assert len(builder.build(replace(more, prompts=(), messages=chat))) == number


def test_a_prompt_that_does_not_fit_is_not_copied_for_each_choice(host: ModelHost) -> None:
    """A body of some megabytes would take some gigabytes; the reason names what the client sent."""
    longest = host.model.max_model_len
    request = GenerationRequest("r", prompts=((5,) * longest,), num_choices=64)
    with pytest.raises(PromptTooLong, match=f"{longest} tokens, and the prompt has") as caught:
        SequenceBuilder(host, OffLoop()).build(request)
    assert caught.value.param == "prompt"
    chat = ({"role": "user", "content": "hi " * longest},)
    with pytest.raises(PromptTooLong) as caught:
        SequenceBuilder(host, OffLoop()).build(GenerationRequest("r", messages=chat))
    assert caught.value.param == "messages"
    alone = replace(request, num_choices=1, sampling={"prompt_logprobs": 0, "max_tokens": 0})
    assert len(SequenceBuilder(host, OffLoop()).build(alone)) == 1


def test_what_fits_is_what_fits_into_the_cache() -> None:
    """Not what would fit into the model's context, where that is more: a client who cuts the prompt
    to what is told has it answered."""
    config = {
        "name": "m",
        "model": "hdserve-mini",
        "engine": {"compile": False, "exact": False, "kv_cache_tokens": 128},
        "drafting": {"adapts_budget": False},
    }
    host = ModelHost(ModelConfig.model_validate(config))
    longest = host.make_engine().max_total_tokens
    assert longest < host.model.max_model_len
    for number in (longest, 10 * host.model.max_model_len):
        request = GenerationRequest("r", prompts=((5,) * number,))
        with pytest.raises(PromptTooLong, match=f"length is {longest} tokens"):
            SequenceBuilder(host, OffLoop()).build(request)
    fits = GenerationRequest("r", prompts=((5,) * (longest - 1),))
    assert len(SequenceBuilder(host, OffLoop()).build(fits)) == 1


TOO_LONG = "a b " * 30_000


@pytest.mark.parametrize(
    "asked",
    [
        {"prompts": (TOO_LONG,)},
        {"prompts": ("short", TOO_LONG, TOO_LONG)},
        {"messages": ({"role": "user", "content": TOO_LONG}, *CHAT)},
    ],
    ids=["text", "texts", "chat"],
)
def test_a_prompt_that_is_far_too_long_is_not_read_whole(
    host: ModelHost, asked: dict[str, Any]
) -> None:
    """The reason says how many tokens it has at least."""
    with pytest.raises(PromptTooLong, match=r"the prompt has at least \d{4}, which") as caught:
        SequenceBuilder(host, OffLoop()).build(GenerationRequest("r", **asked))
    assert caught.value.param == ("messages" if "messages" in asked else "prompt")


def test_a_prompt_that_is_a_bit_too_long_is_counted(host: ModelHost) -> None:
    """All its tokens are told."""
    text = "a b " * (host.model.max_model_len // 2)
    number = len(host.tokenizer.encode(text))
    with pytest.raises(PromptTooLong, match=f"the prompt has {number}, which"):
        SequenceBuilder(host, OffLoop()).build(GenerationRequest("r", prompts=(text,)))


def test_choices_of_a_prompt_share_its_log_probabilities(host: ModelHost) -> None:
    """Of each prompt its own, also where two are the same; a single choice keeps nothing."""
    request = GenerationRequest(
        "r", prompts=((5, 6), (5, 6)), num_choices=3, sampling={"prompt_logprobs": 0}
    )
    scores = [seq.prompt_scores for seq in SequenceBuilder(host, OffLoop()).build(request)]
    assert [scores.index(item) for item in scores] == [0, 0, 0, 3, 3, 3]
    assert None not in scores
    alone = SequenceBuilder(host, OffLoop()).build(replace(request, num_choices=1))
    assert [seq.prompt_scores for seq in alone] == [None, None]


def test_choices_share_what_finds_their_prompt(host: ModelHost) -> None:
    """Where prompts are reused at all."""
    prompts = ((5,) * 70, (6,) * 70)
    request = GenerationRequest("r", prompts=prompts, num_choices=2, namespace="anna")
    keyed = [seq.keyed_prompt for seq in SequenceBuilder(host, OffLoop()).build(request)]
    assert [keyed.index(item) for item in keyed] == [0, 0, 2, 2]
    assert keyed[2].token_ids.tolist() == [6] * 70
    assert (len(keyed[2].keys), keyed[2].namespace) == (2, "anna")
    config = ModelConfig(name="m", model="hdserve-mini", engine=EngineConfig(prefix_caching=False))
    without = ModelHost(config, model=host.model)
    assert SequenceBuilder(without, OffLoop()).build(request)[0].keyed_prompt is None


def test_choices_share_what_a_penalty_needs_of_their_prompt(host: ModelHost) -> None:
    """Without one that is nothing."""
    request = GenerationRequest(
        "r", prompts=((5, 6, 5), (7,)), num_choices=2, sampling={"repetition_penalty": 1.2}
    )
    build = SequenceBuilder(host, OffLoop()).build
    first, second, third, fourth = [seq.seen_tokens for seq in build(request)]
    assert sorted(first.tolist()) == [5, 6]
    assert second is first
    assert third.tolist() == [7]
    assert fourth is third
    assert build(replace(request, sampling={}))[0].seen_tokens.tolist() == []


def test_all_choices_share_the_tokens_that_are_allowed(host: ModelHost) -> None:
    """Which may be most of a vocabulary; those outside it are refused before any sequence is."""
    build = SequenceBuilder(host, OffLoop()).build
    request = GenerationRequest(
        "r", prompts=((5, 6), (7,)), num_choices=3, sampling={"allowed_token_ids": (5, 7, 5)}
    )
    first, *others = [seq.allowed_tokens for seq in build(request)]
    assert first is not None
    assert all(item is first for item in others)
    assert build(replace(request, sampling={}))[0].allowed_tokens is None
    with pytest.raises(InvalidRequest, match="allowed_token_ids: the token id"):
        build(replace(request, sampling={"allowed_token_ids": (10**6,)}))


def test_ids_outside_the_vocabulary_are_refused_once_for_all_choices(host: ModelHost) -> None:
    """By what the client calls them, also where a tokenizer has more tokens than its model."""
    model = replace(host.model, vocab_size=100)
    narrow = ModelHost(ModelConfig(name="m", model="hdserve-mini"), model=model)
    build = SequenceBuilder(narrow, OffLoop()).build
    request = GenerationRequest("r", prompts=((5, 99),), num_choices=2)
    assert all(seq.is_prompt_checked for seq in build(request))
    wrong = replace(request, prompts=((5, 100),))
    chat = replace(request, prompts=(), messages=CHAT)
    for refused, param in ((wrong, "prompt"), (chat, "messages")):
        with pytest.raises(InvalidRequest, match="is not in the vocabulary") as caught:
            build(refused)
        assert caught.value.param == param


def test_equal_requests_have_ids_of_their_own(host: ModelHost) -> None:
    """A client may use an id again while the first request runs."""
    build = SequenceBuilder(host, OffLoop()).build
    (first,), (second,) = (build(GenerationRequest("r", messages=CHAT)) for _ in range(2))
    assert first.request_id.startswith("r/")
    assert first.request_id != second.request_id
    assert first.token_ids == second.token_ids


def test_what_the_client_chose(host: ModelHost) -> None:
    """Sampling and speculation, the prediction as token ids without special ones."""
    request = GenerationRequest(
        "r",
        messages=CHAT,
        sampling={"temperature": 0.5, "seed": 3},
        speculation={"max_draft_tokens": 7},
        prediction="a table",
    )
    (seq,) = SequenceBuilder(host, OffLoop()).build(request)
    assert (seq.params.temperature, seq.params.seed) == (0.5, 3)
    assert seq.speculation.max_draft_tokens == 7
    found = list(seq.speculation.prediction)
    assert found == host.tokenizer.encode("a table", adds_special_tokens=False)


def test_a_prediction_is_read_once_and_no_further_than_an_answer_goes(host: ModelHost) -> None:
    """All choices share it; what is behind the context's end could not appear."""
    longest = host.model.max_model_len
    request = GenerationRequest(
        "r", messages=CHAT, num_choices=3, prediction="a table " * (longest + 1)
    )
    first, *others = SequenceBuilder(host, OffLoop()).build(request)
    whole = host.tokenizer.encode(request.prediction or "", adds_special_tokens=False)
    assert list(first.speculation.prediction) == whole[:longest] != whole
    assert all(seq.speculation is first.speculation for seq in others)


def test_a_wrong_grammar_is_the_fault_of_who_asked_for_it(host: ModelHost) -> None:
    """Whatever parameter it was."""
    request = GenerationRequest(
        "r", messages=CHAT, sampling={"grammar": grammar.regex("(")}, grammar_param="guided_regex"
    )
    with pytest.raises(InvalidRequest) as caught:
        SequenceBuilder(host, OffLoop()).build(request)
    assert caught.value.param == "guided_regex"


def test_grammars_are_compiled_beside_others(host: ModelHost) -> None:
    """However short the request is, the event loop goes on meanwhile."""
    request = GenerationRequest(
        "r", prompts=((5, 6),), sampling={"grammar": grammar.json_object()}, num_body_bytes=100
    )

    async def others() -> None:
        while True:
            num_turns.append(1)
            await asyncio.sleep(0)

    async def test() -> None:
        task = asyncio.create_task(others())
        assert len(await SequenceBuilder(host, OffLoop()).build_off_loop(request)) == 1
        task.cancel()

    num_turns: list[int] = []
    asyncio.run(test())
    assert num_turns


def test_who_knows_a_grammar_waits_for_no_other_one(
    host: ModelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do long prompts: of however many new ones, one thread compiles."""
    num_new = min(32, (os.cpu_count() or 1) + 4) + 1  # more than threads that any work may take

    def request(text: str, num_body_bytes: int = 100) -> GenerationRequest:
        sampling = {"grammar": grammar.regex(text)} if text else {}
        return GenerationRequest(
            "r", prompts=((5, 6),), sampling=sampling, num_body_bytes=num_body_bytes
        )

    compile_once, may_compile = host.grammars._compile, threading.Event()

    def compile_later(text: str) -> object:
        assert may_compile.wait(30)
        return compile_once(text)

    builder = SequenceBuilder(host, OffLoop())
    builder.build(request("known"))
    monkeypatch.setattr(host.grammars, "_compile", compile_later)

    async def test() -> None:
        new = [asyncio.create_task(builder.build_off_loop(request(f"{n}"))) for n in range(num_new)]
        await asyncio.sleep(0)
        assert len(await builder.build_off_loop(request("known"))) == 1
        assert len(await builder.build_off_loop(request("", 10_000))) == 1
        assert not any(task.done() for task in new)
        may_compile.set()
        assert len(await asyncio.gather(*new)) == num_new

    asyncio.run(test())


def test_some_requests_wait_for_new_grammars_and_no_more(
    host: ModelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those that bring ones that take long would have the places of all others.  A place is
    free again however its request ends."""
    may_compile = threading.Event()
    compile_once = host.grammars._compile

    def compile_later(text: str) -> object:
        assert may_compile.wait(30)
        return compile_once(text)

    monkeypatch.setattr(host.grammars, "_compile", compile_later)
    builder = SequenceBuilder(host, OffLoop(), max_num_compiling=3)

    def request(text: str) -> GenerationRequest:
        return GenerationRequest("r", prompts=((5, 6),), sampling={"grammar": grammar.regex(text)})

    async def test() -> None:
        texts = ("of few 1", "of few 2", "of few (", "of few 3")
        first, *waiting = [
            asyncio.create_task(builder.build_off_loop(request(text))) for text in texts[:3]
        ]
        await asyncio.sleep(0)
        with pytest.raises(GrammarsOverloaded, match="a new grammar"):
            await builder.build_off_loop(request(texts[3]))
        first.cancel()
        await asyncio.wait([first])
        waiting.append(asyncio.create_task(builder.build_off_loop(request(texts[3]))))
        await asyncio.sleep(0)
        may_compile.set()
        good, wrong, last = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(wrong, InvalidRequest)
        assert [len(found) for found in (good, last) if isinstance(found, list)] == [1, 1]
        assert len(await builder.build_off_loop(request("of few 4"))) == 1

    asyncio.run(test())


class _WaitingBuilder(SequenceBuilder):
    """Builds no large request before it may."""

    def __init__(self, host: ModelHost) -> None:
        super().__init__(host, OffLoop())
        self.may_build = threading.Event()

    def build(self, request: GenerationRequest) -> list[Sequence]:
        if request.num_body_bytes > 1 << 20:
            assert self.may_build.wait(30)
        return super().build(request)


def test_small_requests_wait_for_no_large_ones(host: ModelHost) -> None:
    """Of however many, one thread makes the tokens."""
    builder = _WaitingBuilder(host)
    small = GenerationRequest("r", prompts=((5, 6),), num_body_bytes=10_000)
    large = replace(small, num_body_bytes=1 << 21)

    async def test() -> None:
        waiting = [asyncio.create_task(builder.build_off_loop(large)) for _ in range(60)]
        await asyncio.sleep(0)
        assert len(await builder.build_off_loop(small)) == 1
        assert not any(task.done() for task in waiting)
        builder.may_build.set()
        assert len(await asyncio.gather(*waiting)) == 60

    asyncio.run(test())


def test_the_engine_compiles_no_grammar_of_a_server(
    host: ModelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request brings its own, one for each choice, however many others there are: this engine,
    of token ids alone, could compile none.  They are not tried before, each in a process."""
    monkeypatch.setattr(grammar_module, "memory_bytes", lambda *_: 0)
    texts = [grammar.choice(["ab" * number]) for number in range(1, 35)]
    sequences = [
        seq
        for text in texts
        for seq in SequenceBuilder(host, OffLoop()).build(
            GenerationRequest("r", prompts=((5,),), sampling={"grammar": text}, num_choices=2)
        )
    ]
    engine = make_engine(model=host.model.module, max_num_sequences=8, kv_cache_tokens=1024)
    run(engine, sequences)
    answers = [host.tokenizer.decode(seq.output_token_ids) for seq in sequences]
    assert answers == ["ab" * number for number in range(1, 35) for _ in range(2)]


def test_how_much_to_reason_is_a_variable_of_the_template(tmp_path: Path) -> None:
    """Where it names it."""
    path = tmp_path / "effort.jinja"
    path.write_text("{{ reasoning_effort | default('medium') }}: {{ messages[0].content }}")
    host = ModelHost(ModelConfig(name="m", model="hdserve-mini", chat_template=path))
    request = GenerationRequest("r", messages=CHAT)
    for effort, options, prompt in (
        (None, {}, "medium: hi"),
        ("high", {}, "high: hi"),
        ("none", {}, "none: hi"),
        ("high", {"reasoning_effort": "low"}, "low: hi"),
    ):
        asked = replace(request, reasoning_effort=effort, template_options=options)
        (seq,) = SequenceBuilder(host, OffLoop()).build(asked)
        assert host.tokenizer.decode(seq.token_ids) == prompt


@pytest.mark.parametrize(
    ("effort", "options", "prompt"),
    [
        (None, {}, "- -: hi"),
        ("none", {}, "False False: hi"),
        ("minimal", {}, "True True: hi"),
        ("high", {"verbosity": "low"}, "True True: hi"),
        ("high", {"enable_thinking": False}, "False -: hi"),
        ("none", {"thinking": True}, "- True: hi"),
    ],
)
def test_an_effort_switches_thinking_by_the_variables_of_the_template(
    tmp_path: Path, effort: str | None, options: dict[str, Any], prompt: str
) -> None:
    """Where the request does not set one of them itself."""
    path = tmp_path / "thinking.jinja"
    switches = "{{ enable_thinking | default('-') }} {{ thinking | default('-') }}"
    path.write_text(switches + ": {{ messages[0].content }}")
    host = ModelHost(ModelConfig(name="m", model="hdserve-mini", chat_template=path))
    request = GenerationRequest(
        "r", messages=CHAT, reasoning_effort=effort, template_options=options
    )
    (seq,) = SequenceBuilder(host, OffLoop()).build(request)
    assert host.tokenizer.decode(seq.token_ids) == prompt


@pytest.mark.parametrize(
    ("effort", "options", "prompt"),
    [
        (None, {}, "False low: hi"),
        (None, {"enable_thinking": True}, "True low: hi"),
        ("high", {}, "True high: hi"),
        ("high", {"reasoning_effort": "max"}, "True max: hi"),
        ("none", {"enable_thinking": True}, "True none: hi"),
    ],
)
def test_an_effort_goes_before_the_defaults_of_the_configuration(
    tmp_path: Path, effort: str | None, options: dict[str, Any], prompt: str
) -> None:
    """As does every variable that the request sets itself, which goes before its effort, too."""
    path = tmp_path / "thinking.jinja"
    path.write_text("{{ enable_thinking }} {{ reasoning_effort }}: {{ messages[0].content }}")
    variables = {"enable_thinking": False, "reasoning_effort": "low"}
    defaults = {"chat_template_kwargs": variables}
    config = {"name": "m", "model": "hdserve-mini", "chat_template": path, "defaults": defaults}
    builder = SequenceBuilder(ModelHost(ModelConfig.model_validate(config)), OffLoop())
    request = GenerationRequest(
        "r", messages=CHAT, reasoning_effort=effort, template_options=options
    )
    assert builder.chat_text(request) == prompt


@pytest.mark.parametrize(
    ("template", "is_read"),
    [
        ("{{ reasoning_effort }}", True),
        ("{% if not reasoning_effort is defined %}{% set reasoning_effort = 1 %}{% endif %}", True),
        ("{% generation %}{{ reasoning_effort }}{% endgeneration %}", True),
        ("{{ messages[0].reasoning_effort }} 'reasoning_effort'", False),
    ],
)
def test_variables_that_a_template_reads(tmp_path: Path, template: str, is_read: bool) -> None:
    """Not fields and text of the same name."""
    path = tmp_path / "effort.jinja"
    path.write_text(template)
    host = ModelHost(ModelConfig(name="m", model="hdserve-mini", chat_template=path))
    assert host.tokenizer.has_variable("reasoning_effort", has_tools=False) is is_read


@pytest.mark.parametrize("effort", ["none", "high"])
def test_templates_that_do_not_ask_how_much_to_reason(host: ModelHost, effort: str) -> None:
    """Go without: the gateway says so."""
    request = GenerationRequest("r", messages=CHAT, reasoning_effort=effort)
    (seq,) = SequenceBuilder(host, OffLoop()).build(request)
    (plain,) = SequenceBuilder(host, OffLoop()).build(replace(request, reasoning_effort=None))
    assert seq.token_ids == plain.token_ids

"""A model in this process."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import hdserve.engine.structured_output.grammar as grammar_module
from hdserve import LLM, SamplingParams, SpeculationParams
from hdserve.core import Source, StepOutput
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.errors import ConfigError, HdserveError, InvalidRequest, PromptTooLong, Unsupported
from hdserve.grammar import choice
from hdserve.tree import DraftTree
from tests.llms import OPTIONS


@pytest.fixture(scope="module")
def llm() -> LLM:
    """One whose answers do not depend on what was asked before."""
    return LLM("hdserve-mini", **OPTIONS)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'engine'"):
        LLM("hdserve-mini", engin={})


def test_a_model_is_named_once() -> None:
    """By the key that was given; a path is a path."""
    for wrong in (None, "", 5):
        with pytest.raises(ConfigError) as caught:
            LLM(wrong)  # type: ignore[arg-type]
        assert "name" not in caught.value.message
        assert caught.value.message.count("model: ") == 1
    with pytest.raises(ConfigError, match="'/no/such': there is no such directory"):
        LLM(Path("/no/such"))


@pytest.mark.parametrize(("engine", "slowdown"), [({}, None), ({"prefill_slowdown": 2.0}, 2.0)])
def test_prompts_go_first_unless_a_pace_is_asked_for(
    engine: dict[str, float], slowdown: float | None
) -> None:
    """Nobody reads a stream beside them."""
    engine_options = {"num_threads": 1, "compile": False, "max_num_sequences": 2, "exact": False}
    llm = LLM("hdserve-mini", engine=engine_options | engine, drafting=OPTIONS["drafting"])
    assert llm._host.config.engine.prefill_slowdown == slowdown
    assert len(llm.generate([[5, 9, 11]], SamplingParams(max_tokens=3, ignore_eos=True))) == 1


def test_prompts_have_log_probabilities(llm: LLM) -> None:
    """Of each token but the first, without an answer or before one, which they do not change."""
    prompts = [[5, 300, 41, 7], [9]]
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
    for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
        assert answer.prompt_logprobs is not None
        first, *others = answer.prompt_logprobs
        assert first is None
        assert [item.token_id for item in others if item] == prompt[1:]
        assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [], "length")
    plain = SamplingParams(temperature=0.0, max_tokens=6)
    scored = replace(plain, prompt_logprobs=0)
    (wanted,), (found,) = llm.generate(prompts[:1], plain), llm.generate(prompts[:1], scored)
    assert wanted.prompt_logprobs is None
    assert found.prompt_logprobs is not None
    assert found.token_ids == wanted.token_ids


def test_an_answer_says_what_of_its_parameters_ended_it(llm: LLM) -> None:
    """A stop string, one of ``stop_token_ids``, or neither."""
    (plain,) = llm.generate([[5, 300, 41]], SamplingParams(temperature=0.0, max_tokens=6))
    assert (plain.finish_reason, plain.stop_reason) == ("length", None)
    last = plain.token_ids[-1]
    for asked, wanted in (
        ({"stop": (plain.text[-1],)}, plain.text[-1]),
        ({"stop_token_ids": (last,)}, last),
    ):
        params = SamplingParams(temperature=0.0, max_tokens=6, **asked)
        (found,) = llm.generate([[5, 300, 41]], params)
        assert (found.finish_reason, found.stop_reason) == ("stop", wanted)


def test_one_prompt_alone_is_refused(llm: LLM) -> None:
    """It is not taken for a list of prompts; the reason says what to write."""
    message = {"role": "user", "content": "a"}
    prompts: list[Any] = ["one text", [5, 300, 41], message, [message], [["a", "b"]], None]
    for prompt in prompts:
        with pytest.raises(InvalidRequest, match=r"generate\(\[prompt\]\)"):
            llm.generate(prompt)


def test_what_is_no_token_and_no_text_is_refused_by_name(llm: LLM) -> None:
    """Not with an error of the library that would have taken it."""
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ([5], {"logit_bias": {"5": 1.0}}, "logit_bias"),
        ([5], {"stop_token_ids": ("a",)}, "stop_token_ids"),
        ("a\ud800", {}, "prompt"),
        ([{"role": "user", "content": "\ud800"}], {}, "prompt"),
        ([{"role": "user", "content": "a"}, 5], {}, "prompt"),
        (b"text", {}, "prompt"),
    ]
    for prompt, fields, param in wrong:
        with pytest.raises(InvalidRequest) as caught:
            llm.generate([prompt], SamplingParams(max_tokens=1, **fields))
        assert caught.value.param == param


def test_parameters_that_are_none_are_refused_by_name(llm: LLM) -> None:
    """A dictionary, or of a stream a list: nothing is generated with another's."""
    of_a_stream: Any = [SamplingParams(max_tokens=1)]
    with pytest.raises(InvalidRequest, match="one SamplingParams"):
        llm.stream([5], of_a_stream)
    wrong: Any = {"temperature": 0.0}
    for answer in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequest, match="one SamplingParams") as caught:
            answer([[5]], wrong)
        assert caught.value.param == "params"
    speculation: Any = {"is_enabled": False}
    for answer in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequest, match="one SpeculationParams") as caught:
            answer([[5]], None, speculation)
        assert caught.value.param == "speculation"


def test_a_prediction_is_token_ids(llm: LLM) -> None:
    """A text, which the API over HTTP takes, would draft nothing and fill the log."""
    wrong: list[Any] = ["a text", ("a", "text"), None, 5, iter([5])]
    for prediction in wrong:
        with pytest.raises(InvalidRequest, match="not the text") as caught:
            llm.generate([[5]], None, SpeculationParams(prediction=prediction))
        assert caught.value.param == "speculation.prediction"


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    """Decoded together, each is answered as it is alone; there is one for each."""
    params = [SamplingParams(temperature=0.0, max_tokens=3), SamplingParams(seed=7, max_tokens=5)]
    prompts = [[5, 300], [9, 8]]
    found = llm.generate(prompts, params)
    alone = [llm.generate([prompts[number]], own)[0] for number, own in enumerate(params)]
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in alone]
    assert [len(answer.token_ids) for answer in found] == [3, 5]
    wrong: list[Any] = [params[:1], [*params, params[0]], [None, None], [params[0], {}]]
    for each in wrong:
        with pytest.raises(InvalidRequest, match=r"give one each|list of one") as caught:
            llm.generate(prompts, each)
        assert caught.value.param == "params"


CHAT = [{"role": "user", "content": "A table for two, please."}]


def test_a_chat_is_answered_by_its_template(llm: LLM) -> None:
    """One, or each of several, as `generate` answers them; the tokens that were asked are told."""
    params = SamplingParams(temperature=0.0, max_tokens=6)
    other = [*CHAT, {"role": "assistant", "content": "When?"}, {"role": "user", "content": "Now."}]
    wanted = llm.generate([CHAT, other], params)
    (alone,) = llm.chat(CHAT, params)
    both = llm.chat([CHAT, other], [params, params])
    assert alone.token_ids == both[0].token_ids == wanted[0].token_ids
    assert both[1].token_ids == wanted[1].token_ids
    (again,) = llm.generate([alone.prompt_token_ids], params)
    assert again.token_ids == alone.token_ids
    assert both[1].prompt_token_ids[: len(CHAT)] == alone.prompt_token_ids[: len(CHAT)]
    assert llm.chat([]) == []


def test_text_and_token_ids(llm: LLM) -> None:
    """Of a prompt that is a text the same, and of an answer its text."""
    text, params = "I would like", SamplingParams(temperature=0.0, max_tokens=8)
    (answer,) = llm.generate([text], params)
    assert llm.encode(text) == answer.prompt_token_ids
    assert llm.decode(answer.token_ids, skips_special_tokens=True) == answer.text
    assert llm.decode(llm.encode(text, adds_special_tokens=False)) == text
    assert llm.decode(iter(answer.token_ids)) == llm.decode(answer.token_ids) != ""
    assert llm.decode([]) == ""
    for wrong in ([10**9], [-1], ["a"], "text"):
        with pytest.raises(InvalidRequest, match=r"^token_ids: "):
            llm.decode(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="takes a text"):
        llm.encode([5])  # type: ignore[arg-type]


def test_defaults_of_its_own(tmp_path: Path) -> None:
    """They hold where neither parameters nor template variables are given."""
    template = tmp_path / "chat.jinja"
    template.write_text("{{ start }} {{ messages[0].content }}")
    variables = {"chat_template_kwargs": {"start": "First:"}}
    defaults = {"temperature": 0.0, "max_tokens": 3, **variables}
    llm = LLM("hdserve-mini", chat_template=template, defaults=defaults, **OPTIONS)
    assert (llm.sampling().temperature, llm.sampling().max_tokens) == (0.0, 3)
    chosen = llm.sampling(temperature=0.5, max_tokens=4)
    assert (chosen.temperature, chosen.max_tokens) == (0.5, 4)
    (answer,), (other,), (asked,) = (
        llm.chat(CHAT),
        llm.chat(CHAT, chosen, chat_template_kwargs={"start": "Then:"}),
        llm.generate([CHAT]),
    )
    assert answer.prompt_token_ids == asked.prompt_token_ids
    assert answer.token_ids == asked.token_ids
    (text,) = llm.generate(["A taxi to the"])
    assert len(text.token_ids) == 3
    for found, start in ((answer, "First:"), (other, "Then:")):
        assert llm.decode(found.prompt_token_ids) == f"{start} {CHAT[0]['content']}"


def test_a_message_goes_on(llm: LLM) -> None:
    """From a beginning of what the model says, as it would have; or after it has ended."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (whole,) = llm.chat(CHAT, params)
    (begun,) = llm.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    chat = [*CHAT, {"role": "assistant", "content": begun.text}]
    (rest,) = llm.chat(chat, params, continue_final_message=True)
    assert rest.prompt_token_ids == [*whole.prompt_token_ids, *begun.token_ids]
    assert rest.token_ids[:6] == whole.token_ids[6:]
    (after,) = llm.chat(chat, params, add_generation_prompt=False)
    (answer,) = llm.chat(chat, params)
    num_ending = len(after.prompt_token_ids) - len(rest.prompt_token_ids)
    assert 0 < num_ending < len(answer.prompt_token_ids) - len(rest.prompt_token_ids)
    with pytest.raises(InvalidRequest, match="cannot go with"):
        llm.chat(chat, params, continue_final_message=True, add_generation_prompt=True)


def test_a_chat_may_be_as_clients_of_the_api_have_it(llm: LLM) -> None:
    """With parts, a silent assistant, and what says nothing: asked in all ways it is what the texts
    alone are."""
    params = SamplingParams(temperature=0.0, max_tokens=2)
    lines = [CHAT[0]["content"], "It is for two."]
    first = {"role": "user", "content": "\n".join(lines)}
    plain = [first, {"role": "assistant", "content": ""}, CHAT[0]]
    parts = [{"type": "text", "text": line} for line in lines]
    silent = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}
    chat = [{"role": "user", "content": parts, "name": None}, silent, CHAT[0]]
    (wanted,), (asked,), (prompt,) = (
        llm.chat(plain, params),
        llm.chat(chat, params),
        llm.generate([chat], params),
    )
    assert asked.prompt_token_ids == prompt.prompt_token_ids == wanted.prompt_token_ids
    *_, last = llm.stream(chat, params)
    assert last.sequence.token_ids == [*wanted.prompt_token_ids, *wanted.token_ids]


def test_what_is_no_chat_is_refused_by_name(llm: LLM) -> None:
    """Of several chats the one that is wrong is named; the reason says what to write."""
    for messages in ("text", [[]], CHAT[0], ["text"], [CHAT, "text"], [[5]], [CHAT, CHAT[0]], None):
        wrong: Any = messages
        with pytest.raises(InvalidRequest, match=r'chat\(\[\{"role": "user"') as caught:
            llm.chat(wrong)
        assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]: a message of role 'user' needs"):
        llm.chat([CHAT, [{"role": "user"}]])
    with pytest.raises(InvalidRequest, match=r"^a message of role 'user' needs content"):
        llm.chat([{"role": "user"}])
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]: a message needs a role"):
        llm.chat([CHAT, [{"content": "a"}]])
    with pytest.raises(Unsupported, match="does not know tools"):
        llm.chat(CHAT, tools=[{"type": "function", "function": {"name": "a"}}])
    with pytest.raises(InvalidRequest, match="is not a template variable"):
        llm.chat(CHAT, chat_template_kwargs={"tokenize": True})


@pytest.mark.parametrize(
    ("keyword", "instead"),
    [
        ("sampling_params", "write params"),
        ("temperature", r"write params=SamplingParams\(temperature=...\)"),
        ("prompt_token_ids", r"generate\(\[token_ids\]\)"),
        ("use_tqdm", "leave it out"),
        ("seeds", "there is no argument 'seeds'$"),
    ],
)
def test_what_other_libraries_call_an_argument_is_told(
    llm: LLM, keyword: str, instead: str
) -> None:
    unknown: Any = {keyword: None}
    for answer in (llm.generate, llm.chat, llm.stream):
        with pytest.raises(InvalidRequest, match=instead) as caught:
            answer([], **unknown)
        assert caught.value.param == keyword


def test_where_other_libraries_have_the_text_is_told(llm: LLM) -> None:
    (answer,) = llm.generate([[5]], SamplingParams(max_tokens=1))
    with pytest.raises(AttributeError, match=r"write \.text"):
        answer.outputs  # noqa: B018


def test_of_several_prompts_the_one_that_cannot_be_answered_is_named(llm: LLM) -> None:
    """Also where it is only the model that it does not fit; nothing is left of the others."""
    params = SamplingParams(temperature=0.0, max_tokens=3)
    wrong: list[tuple[Any, type[InvalidRequest]]] = [
        ("", InvalidRequest),
        ([10**9], InvalidRequest),
        ([5] * 5000, PromptTooLong),
        ([{"role": "user"}], InvalidRequest),
        (None, InvalidRequest),
    ]
    for prompt, kind in wrong:
        with pytest.raises(kind, match=r"^prompts\[1\]: "):
            llm.generate([[5], prompt, [7]], params)
    assert [len(answer.token_ids) for answer in llm.generate([[5], [7]], params)] == [3, 3]


@pytest.fixture(scope="module")
def llm_of_two_places() -> LLM:
    return LLM(
        "hdserve-mini", **{**OPTIONS, "engine": OPTIONS["engine"] | {"max_num_sequences": 2}}
    )


def test_the_next_prompt_takes_the_place_of_one_that_is_answered(llm_of_two_places: LLM) -> None:
    """Short answers follow each other while a long one goes on, all as `generate` gives them; no
    prompt waits in the engine."""
    llm, plain = llm_of_two_places, SpeculationParams(is_enabled=False)
    prompts = [[5, 300, 41], [9, 8], [7], [300, 5]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True)
        for number in (16, 2, 3, 2)
    ]
    wanted = [answer.token_ids for answer in llm.generate(prompts, params, plain)]
    found = {}
    for number, answer in llm.as_completed(iter(prompts), params, plain):
        found[number] = answer.token_ids
        assert llm._engine.stats.num_running + llm._engine.stats.num_waiting <= 1
    assert [*found] == [1, 2, 3, 0]
    assert [found[number] for number in range(len(prompts))] == wanted


def test_what_has_ended_is_forgotten(
    llm_of_two_places: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a call of any number of prompts keeps those that go on, and ends these alone."""
    llm, aborted = llm_of_two_places, list[str]()
    abort = llm._engine.abort
    monkeypatch.setattr(llm._engine, "abort", lambda name: [aborted.append(name), abort(name)])
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    each = [replace(params, max_tokens=40), *[params] * 20]
    answers = llm.as_completed([[5]] * len(each), each, SpeculationParams(is_enabled=False))
    for number, _ in islice(answers, 15):
        assert number > 0
        assert len(llm._outputs) == 1
    assert aborted == []
    answers.close()
    assert len(aborted) == 1
    assert not llm._outputs
    assert not llm._engine.has_work
    assert len(llm.generate([[7]] * 6, params)) == 6
    assert len(aborted) == 1


def test_a_prompt_that_takes_a_place_is_refused_by_name(llm_of_two_places: LLM) -> None:
    """After the answers that ended before; nothing is left of those that were going on."""
    llm = llm_of_two_places
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    each = [params, replace(params, max_tokens=40), params]
    answers = llm.as_completed([[5], [7], [10**9]], each, SpeculationParams(is_enabled=False))
    assert next(answers)[0] == 0
    with pytest.raises(InvalidRequest, match=r"^prompts\[2\]: "):
        next(answers)
    assert not llm._engine.has_work
    assert not llm._outputs
    with pytest.raises(InvalidRequest, match="into a list"):
        llm.as_completed("a text")


def test_a_stream_that_cannot_be_is_refused_at_the_call(llm: LLM) -> None:
    """Not where its first output is read; nothing is left of it."""
    for prompt in ([10**9], []):
        with pytest.raises(InvalidRequest):
            llm.stream(prompt)
    llm.stream([5])  # never read
    (answer,) = llm.generate([[5]], SamplingParams(temperature=0.0, max_tokens=3))
    assert len(answer.token_ids) == 3


def test_equal_prompts_with_one_seed_get_equal_answers(llm: LLM) -> None:
    """An answer does not depend on what else is asked; without parameters each has its own seed."""
    params = SamplingParams(seed=7, max_tokens=12)
    (alone,) = llm.generate([[5, 300]], params)
    first, second = llm.generate([[5, 300], [5, 300]], params)
    assert alone.token_ids == first.token_ids == second.token_ids


def test_an_answer_that_fails_says_why(llm: LLM) -> None:
    """The others are what they are without it."""
    params = SamplingParams(temperature=0.0, max_tokens=6)
    (wanted,) = llm.generate([[5, 300]], params)
    unchecked = replace(params)
    object.__setattr__(unchecked, "stop", (("a",),))
    (failed,) = llm.generate([[5, 300]], unchecked)
    assert (failed.finish_reason, type(failed.error)) == ("error", HdserveError)
    (again,) = llm.generate([[5, 300]], params)
    assert (again.token_ids, again.error) == (wanted.token_ids, None)


def test_answers_that_are_read_in_turns_are_those_of_each_alone(llm: LLM) -> None:
    """A step decodes all that run: each iterator gives its own answer, also while a whole answer
    is waited for."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [[5, 300, 41, 7], [9, 8], [300, 5]]
    alone = [answer.token_ids for answer in llm.generate(prompts, params)]
    first, second = (llm.stream(prompt, params) for prompt in prompts[:2])
    found: list[list[int]] = [[*next(first).token_ids], [*next(second).token_ids]]
    (third,) = llm.generate(prompts[2:], params)
    for tokens, stream in zip(found, (first, second), strict=True):
        tokens += [token for output in stream for token in output.token_ids]
    assert [*found, third.token_ids] == alone


def test_a_stream_whose_outputs_do_not_come_ends_with_an_error(llm: LLM) -> None:
    """It looks like no whole answer."""
    stream = llm.stream([9, 8], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    llm._engine.abort(next(stream).sequence.request_id)
    with pytest.raises(HdserveError, match="nothing more"):
        next(stream)


def test_answers_that_are_waited_for_keep_no_drafts(llm: LLM) -> None:
    """What is held of a step until the last answer is there is what answers have; no garbage is
    collected meanwhile, so that all of it is among the youngest objects."""
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    prompts = [[9, 8, number] for number in range(6)]
    numbers: list[int] = []

    def count_held() -> None:
        young = gc.get_objects(generation=0)
        numbers.append(sum(type(each) in (StepOutput, DraftTree) for each in young))

    gc.collect()
    gc.disable()
    hook = llm._host.model.module.register_forward_pre_hook(lambda *_: count_held())
    try:
        answers = llm.generate(prompts, params)
    finally:
        hook.remove()
        gc.enable()
    assert [len(answer.token_ids) for answer in answers] == [24] * 6
    assert len(numbers) > 4
    assert 0 < max(numbers) <= 2 * len(prompts)


def test_what_a_penalty_needs_of_a_prompt_is_there_before_the_engine_is_in_use(llm: LLM) -> None:
    seq = llm._sequence([5, 6, 5], SamplingParams(repetition_penalty=1.2), None)
    assert sorted(seq.seen_tokens.tolist()) == [5, 6]


def test_each_of_many_grammars_is_compiled_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are more than are kept, for which other calls would wait."""
    compiled: list[str] = []
    compile_one = Grammars._compile
    monkeypatch.setattr(grammar_module, "_MAX_KEPT", 1)
    monkeypatch.setattr(
        Grammars, "_compile", lambda self, text: compiled.append(text) or compile_one(self, text)
    )
    grammars = [choice([f"the {number}th"]) for number in range(3)]
    params = [SamplingParams(grammar=each, max_tokens=16) for each in grammars]
    answers = llm.generate([[7]] * 3, params)
    assert [answer.text for answer in answers] == ["the 0th", "the 1th", "the 2th"]
    assert compiled == grammars


def test_what_is_remembered_is_drafted_from() -> None:
    """The answer of another process comes in fewer steps, and is the same."""
    prompts = ["A table for two in"]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    (first,) = LLM("hdserve-mini", **OPTIONS).generate(prompts, params)
    assert Source.MODEL not in first.counts.accepted_by_source
    llm = LLM("hdserve-mini", **OPTIONS)
    llm.remember([first.token_ids])
    (again,) = llm.generate(prompts, params)
    assert again.token_ids == first.token_ids
    assert again.counts.accepted_by_source[Source.MODEL] > 0
    assert again.counts.num_steps < first.counts.num_steps


def test_what_is_remembered_is_token_ids(llm: LLM) -> None:
    """One output without a list around it, texts, and ids that are none: nothing of them stays."""
    vocab_size, num_tokens = llm._host.model.vocab_size, llm._host.own_database.num_tokens
    wrong: list[Any] = [[5, 300], ["a text"], "a text", [["a"]], None, [[5], [-1]], [[vocab_size]]]
    for outputs in wrong:
        with pytest.raises(InvalidRequest) as caught:
            llm.remember(outputs)
        assert caught.value.param == "outputs"
    assert llm._host.own_database.num_tokens == num_tokens

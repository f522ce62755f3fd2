"""The requests of the OpenAI API: what is accepted, what is refused, and what it means here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, StrictBool, StrictFloat

from deployments.generation import (
    REASONING_EFFORT,
    THINKING_SWITCHES,
    THINKING_VARIABLES,
    VERBOSITY,
    GenerationRequest,
    Prompt,
)
from deployments.openai.body import Body, ClosedBody, Number, OptionalInteger, Truth, at_most
from deployments.openai.chat_fields import ChatFields
from deployments.openai.messages import (
    Messages,
    Parts,
    joined,
    left_out_of,
    messages_for_template,
)
from deployments.openai.prompt_logprobs import PromptLogprobFields
from deployments.openai.request_body import OfferedBody, RequestBody
from deployments.openai.sampling_fields import SamplingFields
from deployments.openai.structured import Constraint, StructuredFields, one_of
from deployments.openai.thinking import ReasoningEffort as ReasoningEffort
from deployments.openai.thinking import ThinkingFields
from deployments.openai.tools import ToolFields, Tools, check_tools
from deployments.parsers.tool_parser import ToolParser
from deployments.parsers.tool_parsers import HermesToolParser
from hdserve.core import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIASES, MAX_TOP_LOGPROBS
from hdserve.errors import InvalidRequest, Unsupported

MAX_CHOICES = 64
"""Most choices of one prompt."""

MAX_ANSWERS = 256
"""Most choices of all prompts of one request together."""

MAX_STOP_TOKEN_IDS = 1024

# Of a list of a million wrong items the first is enough to refuse it.
Texts = Annotated[tuple[str, ...], Field(fail_fast=True)]
TokenIds = Annotated[tuple[Annotated[int, Field(strict=True)], ...], Field(fail_fast=True)]

Verbosity = Literal["low", "medium", "high"]

_SAMPLING_FIELDS = (
    *SamplingFields.model_fields,
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)

OF_RESPONSES: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "input": (),
    "instructions": ("",),
    "max_output_tokens": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
}
"""Parameters of the Responses API that no other has, with the values that change nothing."""

MAX_DATABASES = 16
"""The most databases that a request may name; there are fewer."""


def variables_of(
    effort: ReasoningEffort | None,
    verbosity: Verbosity | None,
    effort_name: str = REASONING_EFFORT,
    verbosity_name: str = VERBOSITY,
) -> Mapping[str, Collection[str]]:
    """Return the variables of chat templates, in any of which a parameter is met, by its name; a
    medium verbosity asks for nothing."""
    found: dict[str, Collection[str]] = {}
    if effort is not None:
        found[effort_name] = THINKING_VARIABLES
    if verbosity not in {None, "medium"}:
        found[verbosity_name] = (VERBOSITY,)
    return found


class StreamOptions(Body):
    """``stream_options`` of the OpenAI API."""

    include_usage: Truth | None = None
    continuous_usage_stats: Truth | None = None
    """Whether the chunks before the last one say how many tokens there are so far; as vLLM has it,
    only beside ``include_usage``."""

    include_obfuscation: Truth | None = None
    """Padding against an observer of packet sizes; this server never adds it."""

    include_sources: Truth | None = None
    """Whether chunks say where each token came from; an extension of hdserve."""


class Speculation(ClosedBody):
    """How this request is drafted for; an extension of hdserve."""

    enabled: Truth = True
    max_draft_tokens: OptionalInteger = Field(default=None, ge=0)
    databases: (
        Annotated[
            tuple[Literal["context", "model", "statistics", "recycled", "other", "grammar"], ...],
            Field(max_length=MAX_DATABASES, fail_fast=True),
        ]
        | None
    ) = None
    share_output: Truth = True


class Prediction(Body):
    """``prediction`` of the OpenAI API: text that is likely to appear in the answer."""

    type: Literal["content"] = "content"
    content: str | Parts


class GenerationBody(RequestBody, StructuredFields, PromptLogprobFields, SamplingFields):
    """What chat and plain completions have in common."""

    without_effect: ClassVar[frozenset[str]] = RequestBody.without_effect | {"metadata", "user"}

    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[Mapping[int, StrictFloat], at_most(MAX_LOGIT_BIASES)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    max_tokens: OptionalInteger = None
    max_completion_tokens: OptionalInteger = Field(default=None, ge=1)
    """The newer name, which goes first; clients send both."""

    min_tokens: OptionalInteger = None
    n: OptionalInteger = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: str | Texts | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: Truth | None = None
    ignore_eos: Truth | None = None
    skip_special_tokens: Truth | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Truth | None = None
    speculation: Speculation | None = None

    @property
    def param_names(self) -> Mapping[str, str]:
        if self.max_completion_tokens is None:
            return {}
        return {"max_tokens": "max_completion_tokens"}

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an answer, by either name."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_in_chunks(self) -> bool:
        """Whether each chunk of a stream says how many tokens its choice has so far."""
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def includes_sources(self) -> bool:
        """Whether a stream says where tokens come from."""
        return bool(self.stream_options and self.stream_options.include_sources)

    def sampling(self, num_logprobs: int | None, constraint: Constraint | None) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that the client set."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        if found["top_k"] == -1:
            found["top_k"] = 0
        if found["seed"] == -1:
            found["seed"] = None
        found |= {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids and tuple({*self.allowed_token_ids}),
            "max_tokens": self.most_tokens,
            "logprobs": num_logprobs,
            "stop": self._stop_strings(),
            "stop_token_ids": self.stop_token_ids,
            "grammar": constraint and constraint.grammar,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _stop_strings(self) -> tuple[str, ...] | None:
        """Return what ends the answer; an empty text, as forms send it, asks for nothing."""
        found = (self.stop,) if isinstance(self.stop, str) else self.stop
        return None if found is None else tuple(filter(None, found))

    def speculation_fields(self) -> dict[str, Any]:
        """Return the fields of ``SpeculationParams`` that the client set."""
        if self.speculation is None:
            return {}
        databases = self.speculation.databases
        return {
            "is_enabled": self.speculation.enabled,
            "max_draft_tokens": self.speculation.max_draft_tokens,
            "databases": None if databases is None else frozenset(databases),
            "is_output_shared": self.speculation.share_output,
        }


class ChatBody(GenerationBody, ChatFields, ThinkingFields, ToolFields):
    """``POST /v1/chat/completions``."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (False,),
        "best_of": (1,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "moderation": (),
        "prompt": (),
        "suffix": ("",),
        "web_search_options": (),
        **OF_RESPONSES,
    }

    messages: Messages = Field(min_length=1)
    logprobs: StrictBool | None = None  # a completion has a number here
    top_logprobs: OptionalInteger = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    prediction: Prediction | None = None
    verbosity: Verbosity | None = None

    @property
    def unmet(self) -> frozenset[str]:
        """Beside what all requests may ask in vain: calls are held to a strict function's
        parameters only where a call is required, or the answer is held to a form, too."""
        is_free = self.call_mode == "auto" and not self.asks_for_form
        is_unheld = is_free and any(tool.function.strict for tool in self.callable_tools)
        thinking = self.thinking.unmet if self.thinking is not None else ()
        return super().unmet.union({"tools.function.strict"} if is_unheld else (), thinking)

    @property
    def left_out(self) -> Mapping[str, Unsupported]:
        """What tools returned, or the user shows behind it, that is no text."""
        return left_out_of(self.messages)

    @property
    def variables(self) -> Mapping[str, Collection[str]]:
        name, effort = self.effort
        return {**variables_of(effort, self.verbosity, name), **self.switch_variables}

    def to_generation(
        self, request_id: str, tool_parser: type[ToolParser] | None = HermesToolParser
    ) -> GenerationRequest:
        """Return what the model is asked for.

        Args:
            tool_parser: reads the tool calls of the model.

        Raises:
            InvalidRequest: parameters contradict each other.
            Unsupported: a message has a part that is not text, or calls cannot be read.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        num_scores = self.num_prompt_logprobs(is_streamed=bool(self.stream))
        form, calls = self.constraint(), self.tool_constraint(tool_parser)
        # A response format is that of the answer; vLLM's parameters hold the whole output.
        if form is not None and form.param == self.format_param:
            form = None if calls else self.or_calls(form, tool_parser)
        constraint = one_of(form, calls)
        sampling = self.sampling(num_logprobs, constraint)
        if num_scores is not None:
            sampling["prompt_logprobs"] = num_scores
        if self.may_call_tools:  # the marks of a call may be special tokens
            sampling.setdefault("skip_special_tokens", False)
        return GenerationRequest(
            request_id=request_id,
            messages=messages_for_template(self.messages),
            template_options=self._template_options(),
            reasoning_effort=self.effort[1],
            tools=self.template_tools(),
            chat_end=self.chat_end,
            sampling=sampling,
            grammar_param=constraint and constraint.param,
            unheld=constraint.unheld if constraint else (),
            prompt_logprobs_param=None if num_scores is None else "prompt_logprobs",
            num_choices=self.num_choices,
            is_streamed=bool(self.stream),
            speculation=self.speculation_fields(),
            includes_sources=self.includes_sources,
            includes_prompts=bool(self.return_token_ids),
            prediction=None
            if self.prediction is None
            else joined(self.prediction.content, "prediction", separator=""),
        )

    def _template_options(self) -> Mapping[str, Any]:
        given = self.chat_template_kwargs or {}
        verbosity = {} if self.verbosity is None else {VERBOSITY: self.verbosity}
        switches = self.switch_options() if given.keys().isdisjoint(THINKING_SWITCHES) else {}
        return {**verbosity, **switches, **given}


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "chat_template_kwargs": ({},),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "messages": (),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": ("none",),
        "suffix": ("",),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "top_logprobs": (0,),
        "verbosity": ("medium",),
        "web_search_options": (),
        **OF_RESPONSES,
    }

    prompt: (
        str | Texts | TokenIds | Annotated[tuple[TokenIds, ...], Field(fail_fast=True)] | None
    ) = Field(union_mode="left_to_right")
    logprobs: OptionalInteger = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: Truth | None = None
    best_of: OptionalInteger = None

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts one by one; ``null`` is one without text."""
        if self.prompt is None or isinstance(self.prompt, str):
            return (self.prompt or "",)
        if self.prompt and isinstance(self.prompt[0], int):
            return (self.prompt,)
        return cast("tuple[Prompt, ...]", self.prompt)

    def to_generation(self, request_id: str) -> GenerationRequest:
        """Return what the model is asked for.

        Raises:
            InvalidRequest: parameters contradict each other.
            Unsupported: ``best_of`` other than ``n``, or all of the vocabulary.
        """
        if not self.prompts:
            raise InvalidRequest("the prompt is empty", "prompt")
        if len(self.prompts) * self.num_choices > MAX_ANSWERS:
            raise InvalidRequest(f"prompts times n is over {MAX_ANSWERS}", "prompt")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise Unsupported("best_of other than n is not supported", "best_of")
        constraint = self.constraint()
        sampling = self.sampling(self.logprobs, constraint)
        scores = self._scores(computes_prompt=self.most_tokens == 0)
        if scores:
            sampling["prompt_logprobs"] = max(scores.values())
        shown = [name for name, number in scores.items() if getattr(self, name) is not None]
        return GenerationRequest(
            request_id=request_id,
            prompts=self.prompts,
            sampling=sampling,
            api_defaults={"max_tokens": 16},
            grammar_param=constraint and constraint.param,
            unheld=constraint.unheld if constraint else (),
            prompt_logprobs_param=max(shown, key=scores.__getitem__) if shown else None,
            num_choices=self.num_choices,
            is_streamed=bool(self.stream),
            speculation=self.speculation_fields(),
            includes_sources=self.includes_sources,
            includes_prompts=bool(self.return_token_ids),
        )

    def _scores(self, *, computes_prompt: bool) -> dict[str, int]:
        """Return how many likeliest tokens each token of the prompt has, by the parameters that ask
        for them.

        Args:
            computes_prompt: whether nothing else is to be computed.
        """
        found = {}
        if self.echo and (self.logprobs is not None or computes_prompt):
            found["logprobs"] = self.logprobs or 0
        number = self.num_prompt_logprobs(is_streamed=bool(self.stream))
        if number is not None:
            found["prompt_logprobs"] = number
        return found


class TokenizeBody(OfferedBody, ChatFields):
    """``POST /tokenize``: the token ids of a text or of a chat."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    }

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Truth = True
    tools: Tools | None = None
    return_token_strs: Truth | None = None

    @property
    def left_out(self) -> Mapping[str, Unsupported]:
        """What tools returned, or the user shows behind it, that is no text."""
        return left_out_of(self.messages or ())

    def to_generation(self) -> GenerationRequest:
        """Return the conversation as a request to continue it would have it.

        Raises:
            InvalidRequest: parameters contradict each other, or tools are too large.
            Unsupported: a message has a part that is not text.
        """
        check_tools(self.tools)
        return GenerationRequest(
            request_id="",
            messages=messages_for_template(self.messages or ()),
            template_options=self.chat_template_kwargs or {},
            tools=tuple(tool.for_template() for tool in self.tools or ()),
            chat_end=self.chat_end,
        )


class DetokenizeBody(OfferedBody):
    """``POST /detokenize``: the text of token ids."""

    tokens: TokenIds

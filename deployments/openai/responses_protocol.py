"""The requests of the OpenAI Responses API, and the chat each of them is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from deployments.openai.body import Body, ClosedBody, Number, OptionalInteger, Truth, at_most
from deployments.openai.kinds import unsupported
from deployments.openai.labels import MAX_METADATA
from deployments.openai.left_out import LeftOut
from deployments.openai.messages import UncountedMessages
from deployments.openai.protocol import (
    ChatBody,
    ReasoningEffort,
    Speculation,
    Texts,
    Verbosity,
    variables_of,
)
from deployments.openai.request_body import RequestBody
from deployments.openai.responses_input import (
    Input,
    InputItems,
    InputReasoning,
    ReadItem,
    media_left_out,
    messages_of,
)
from deployments.openai.responses_tools import ResponseToolFields
from deployments.openai.sampling_fields import SamplingFields
from deployments.openai.structured import Schema
from hdserve.core import MAX_TOP_LOGPROBS
from hdserve.errors import InvalidRequest, Unsupported

PARAM_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""The names that this API has for the parameters of a chat."""

_SAME_AS_CHAT = (
    "model",
    *SamplingFields.model_fields,
    "repetition_penalty",
    "stop",
    "min_tokens",
    "ignore_eos",
    "parallel_tool_calls",
    "chat_template_kwargs",
)
OF_CHATS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": ([],),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Parameters of a chat that other APIs do not have, with the values that change nothing."""

_LOGPROBS = "message.output_text.logprobs"
"""What ``include`` asks for log probabilities by."""

_NEVER_THERE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""What ``include`` may ask for that belongs to items, or parts of items, that no answer here has.
Some clients ask for it always."""


class TextFormat(ClosedBody):
    """``text.format``: a schema of which, unless it is ``strict``, what cannot be held is left
    out."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: Truth | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the ``response_format`` of a chat, as the chat API, and with it the template, has
        it.

        Raises:
            InvalidRequest: name or schema is missing.
        """
        if self.type != "json_schema":
            return {"type": self.type}
        if self.name is None or self.schema_ is None:
            raise InvalidRequest("text.format needs a name and a schema", "text")
        schema = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(ClosedBody):
    """``text``: the form of the answer."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ResponseStreamOptions(Body):
    """``stream_options`` of this API."""

    include_obfuscation: Truth | None = None
    """Padding against an observer of packet sizes; this server never adds it."""


class _Chat(ChatBody):
    """The chat that a request of this API is, whose errors name ``text`` where the form is
    wrong."""

    format_param: ClassVar[str] = "text"
    schema_path: ClassVar[str] = "text.format.schema"

    messages: UncountedMessages = Field(min_length=1)


class Reasoning(Body):
    """How the model is to reason."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None

    @property
    def unmet(self) -> Mapping[str, bool]:
        """What may be asked in vain, and whether it is: there is no summary, by either of its
        names; the chat template shows what it shows of earlier reasoning; and there is one mode."""
        return {
            "reasoning.summary": bool(self.summary or self.generate_summary),
            "reasoning.context": self.context not in {None, "auto"},
            "reasoning.mode": self.mode not in {None, "auto", "standard"},
        }


class ResponsesBody(RequestBody, ResponseToolFields, SamplingFields):
    """``POST /v1/responses``."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "conversation": (),
        "image": ({}, {"context_compression": "auto"}, {"context_compression": "disabled"}),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        **{name: neutral for name, neutral in OF_CHATS.items() if name not in _SAME_AS_CHAT},
    }

    instead: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("conversation", "previous_response_id"),
        "nothing is stored here, so send the whole conversation as input",
    )

    input: Input
    include: Texts | None = None
    instructions: str | None = None
    max_output_tokens: OptionalInteger = Field(default=None, ge=1)
    max_tool_calls: OptionalInteger = Field(default=None, ge=0)
    """Of the tools that a server runs itself: here none."""

    context_management: Annotated[tuple[Mapping[str, Any], ...], Field(fail_fast=True)] | None = (
        None
    )
    top_logprobs: OptionalInteger = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    repetition_penalty: Number | None = None
    stop: str | Texts | None = None
    min_tokens: OptionalInteger = None
    ignore_eos: Truth | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[Mapping[str, str], at_most(MAX_METADATA)] | None = None
    user: str | None = None
    speculation: Speculation | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def param_names(self) -> Mapping[str, str]:
        return PARAM_NAMES

    @property
    def variables(self) -> Mapping[str, Collection[str]]:
        effort = self.reasoning.effort if self.reasoning is not None else None
        verbosity = self.text.verbosity if self.text is not None else None
        return variables_of(effort, verbosity, "reasoning.effort", "text.verbosity")

    @property
    def unmet(self) -> frozenset[str]:
        """Beside what all requests may ask in vain: what is too long for the context is an error
        and never cut or made shorter, what ``include`` asks for beside log probabilities is never
        there, and calls are held to a strict function's parameters only as in a chat."""
        format_ = self.text.format if self.text is not None else None
        asks_for_form = format_ is not None and format_.type != "text"
        asked = {
            **(self.reasoning.unmet if self.reasoning is not None else {}),
            "context_management": bool(self.context_management),
            "include": any(name in _NEVER_THERE for name in self.include or ()),
            "tools.strict": not asks_for_form
            and any(function.strict for function in self.free_functions),
            "truncation": self.truncation == "auto",
        }
        return super().unmet.union(name for name, is_asked in asked.items() if is_asked)

    @property
    def left_out(self) -> Mapping[str, Unsupported]:
        """Tools that are no functions, what another server did itself, or alone can read, and what
        tools returned, or the user shows behind it, that is no text."""
        found = {
            f"tools.{kind}": unsupported("tools", kind, "tools") for kind in self.left_out_tools
        }
        for item in self._items:
            if isinstance(item, LeftOut):
                found[f"input.{item.type}"] = unsupported("items", item.type, "input")
            elif isinstance(item, InputReasoning) and item.encrypted_content:
                error = Unsupported("encrypted reasoning is not supported", "input")
                found["input.encrypted_content"] = error
        for name, kind in media_left_out(self._read_items):
            found[name] = unsupported("content parts", kind, "input")
        return found

    @property
    def asks_for_logprobs(self) -> bool:
        """Whether the text of the answer has log probabilities."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def to_chat(self) -> ChatBody:
        """Return the chat this is; errors name its parameters, see :data:`PARAM_NAMES`.

        Raises:
            InvalidRequest: a value is wrong.
            Unsupported: a part of the input is not text, or ``include`` asks for a part of the
                answer.
        """
        for name in self.include or ():
            if name not in {_LOGPROBS, *_NEVER_THERE}:
                raise Unsupported(f"include: {name[:50]!r} is not supported", "include")
        return _Chat.parse(self._chat())

    def _chat(self) -> dict[str, Any]:
        fields: dict[str, Any] = self.model_dump(include=set(_SAME_AS_CHAT), exclude_none=True)
        fields["messages"] = list(self._messages())
        fields |= self.tools_for_chat()
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.for_chat()
        if self.text is not None:
            fields["verbosity"] = self.text.verbosity
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.asks_for_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.speculation is not None:
            fields["speculation"] = self.speculation.model_dump()
        return fields

    @property
    def _items(self) -> InputItems:
        return () if isinstance(self.input, str) else self.input

    @property
    def _read_items(self) -> list[ReadItem]:
        return [item for item in self._items if not isinstance(item, LeftOut)]

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
        else:
            yield from messages_of(self._read_items)

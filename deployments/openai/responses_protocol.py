"""The requests of the OpenAI Responses API, and the chat each of them is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from deployments.openai.body import Body, ClosedBody, Truth, at_most
from deployments.openai.kinds import named_kind, only_kinds, unsupported
from deployments.openai.labels import MAX_METADATA
from deployments.openai.left_out import LeftOut
from deployments.openai.messages import MAX_MESSAGES, Parts, joined, media_of
from deployments.openai.protocol import (
    ChatBody,
    ReasoningEffort,
    Speculation,
    Texts,
    Verbosity,
    variables_of,
)
from deployments.openai.request_body import RequestBody
from deployments.openai.responses_tools import ResponseToolFields, full_name
from deployments.openai.structured import Schema
from hdserve.errors import InvalidRequest, Unsupported

PARAM_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""The names that this API has for the parameters of a chat."""

_SAME_AS_CHAT = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
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

_READ_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)

LEFT_OUT_ITEMS = frozenset(
    {
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "mcp_call",
        "mcp_list_tools",
        "web_search_call",
    }
)
"""The types of the items that say what a server did itself, in conversations that began there; what
came of it is in the messages behind them."""

_TEXT_PARTS = ("input_text", "output_text")
_REASONING_PARTS = ("reasoning_text", "summary_text")


class InputMessage(Body):
    """A message of the conversation."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"id", "phase", "status"})

    type: Literal["message"] | None = None
    role: Literal["assistant", "developer", "system", "user"]
    content: str | Parts


class InputReasoning(Body):
    """What the model thought before the message or the call that follows."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    type: Literal["reasoning"]
    summary: Parts = ()
    content: Parts | None = None
    encrypted_content: str | None = None

    def text(self) -> str:
        """Return what it says in full, else its summary; what is encrypted only the server can read
        that wrote it."""
        return joined(self.content or self.summary, "input", _REASONING_PARTS)


class InputCall(Body):
    """A call the model made earlier."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class InputCustomCall(Body):
    """A call of a tool that takes a text, made by the model of another server: here it is one of a
    function with one parameter, as agents offer such a tool to models that know functions alone."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    @property
    def arguments(self) -> Mapping[str, str]:
        """The arguments of the function."""
        return {"input": self.input}


class InputCallOutput(Body):
    """What an earlier call of a tool returned."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Parts


# Brackets tell forms of a value from its fields where an error is told.
def _type_of_item(item: Any) -> Any:
    kind = named_kind(item) or "message"  # which need not say what it is
    if kind in LEFT_OUT_ITEMS:
        return "[left out]"
    return f"[{kind}]" if isinstance(item, Mapping) else None


def _itself(item: Any) -> Any:
    """
    Raises:
        Unsupported: it stands for another one, which is elsewhere.
    """
    if named_kind(item) == "item_reference":
        raise Unsupported(
            "items are not stored here, so none can be referred to: send the item itself, as "
            "clients do that are told store: false",
            "input",
        )
    return item


InputItem = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[InputReasoning, Tag("[reasoning]")]
    | Annotated[InputCall, Tag("[function_call]")]
    | Annotated[InputCallOutput, Tag("[function_call_output]")]
    | Annotated[InputCustomCall, Tag("[custom_tool_call]")]
    | Annotated[InputCallOutput, Tag("[custom_tool_call_output]")]
    | Annotated[LeftOut, Tag("[left out]")],
    Discriminator(_type_of_item),
    only_kinds("items", {*_READ_ITEMS, *LEFT_OUT_ITEMS}, "input"),
    BeforeValidator(_itself),
]
InputItems = Annotated[
    tuple[InputItem, ...], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]
Input = str | InputItems


class TextFormat(ClosedBody):
    """``text.format``; ``strict`` or not, a schema is always held."""

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
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


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


class Reasoning(ClosedBody):
    """How the model is to reason."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None

    @property
    def asks_for_summary(self) -> bool:
        """Whether a summary of the reasoning is wanted, by either of its names."""
        return bool(self.summary or self.generate_summary)


class ResponsesBody(RequestBody, ResponseToolFields):
    """``POST /v1/responses``."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "top_logprobs": (0,),
        **OF_CHATS,
    }

    instead: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("conversation", "previous_response_id"),
        "nothing is stored here, so send the whole conversation as input",
    )

    input: Input
    include: Texts | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
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
        """Beside what all requests may ask in vain: reasoning is never summarised, what is too long
        for the context is an error and never cut, there is nothing to include, and calls are held
        to a strict function's parameters only as in a chat."""
        format_ = self.text.format if self.text is not None else None
        asks_for_form = format_ is not None and format_.type != "text"
        asked = {
            "include": bool(self.include),
            "reasoning.summary": self.reasoning is not None and self.reasoning.asks_for_summary,
            "tools.strict": not asks_for_form
            and any(function.strict for function in self.free_functions),
            "truncation": self.truncation == "auto",
        }
        return super().unmet.union(name for name, is_asked in asked.items() if is_asked)

    @property
    def left_out(self) -> Mapping[str, Unsupported]:
        """Tools that are no functions, what another server did itself, or alone can read, and what
        tools returned that is no text."""
        found = {
            f"tools.{kind}": unsupported("tools", kind, "tools") for kind in self.left_out_tools
        }
        for item in self._items:
            if isinstance(item, LeftOut):
                found[f"input.{item.type}"] = unsupported("items", item.type, "input")
            elif isinstance(item, InputReasoning) and item.encrypted_content:
                error = Unsupported("encrypted reasoning is not supported", "input")
                found["input.encrypted_content"] = error
            elif isinstance(item, InputCallOutput):
                for kind in media_of(item.output):
                    found[f"input.output.{kind}"] = unsupported("content parts", kind, "input")
        return found

    def to_chat(self) -> ChatBody:
        """Return the chat this is; errors name its parameters, see :data:`PARAM_NAMES`.

        Raises:
            InvalidRequest: a value is wrong.
            Unsupported: a part of the input is not text, or ``include`` asks for a part of the
                answer.
        """
        for name in self.include or ():
            if name not in _NEVER_THERE:
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
        if self.speculation is not None:
            fields["speculation"] = self.speculation.model_dump()
        return fields

    @property
    def _items(self) -> InputItems:
        return () if isinstance(self.input, str) else self.input

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
        else:
            items = [item for item in self._items if not isinstance(item, LeftOut)]
            yield from _messages_of(items)


def _messages_of(
    items: Iterable[InputMessage | InputReasoning | InputCall | InputCustomCall | InputCallOutput],
) -> list[Any]:
    """Return the messages of a chat: reasoning belongs to the message of the assistant behind it,
    calls to the one before them, and so does what is said behind them, since results follow the
    message that calls."""
    found: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, InputMessage):
            text = joined(item.content, "input", _TEXT_PARTS)
            if item.role == "assistant" and found and _goes_on(found[-1]):
                found[-1]["content"].append(text)
            else:
                found.append({"role": item.role, "content": [text]})
        elif isinstance(item, InputReasoning):
            thought = item.text()
            if found and _is_reasoning(found[-1]):
                found[-1]["reasoning_content"].append(thought)
            elif thought:
                found.append({"role": "assistant", "content": [], "reasoning_content": [thought]})
        elif isinstance(item, InputCallOutput):
            text = joined(item.output, "input", _TEXT_PARTS, is_result=True)
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": [text]})
        else:
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": []})
            name = full_name(item.namespace, item.name)
            function = {"name": name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            found[-1].setdefault("tool_calls", []).append(call)
    return [_with_texts(message) for message in found]


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose texts are joined, once for all of them."""
    texts, thoughts = message["content"], message.get("reasoning_content")
    content = "\n".join(filter(None, texts)) if texts else None
    reasoning = {} if thoughts is None else {"reasoning_content": "".join(thoughts)}
    return {**message, "content": content, **reasoning}


def _goes_on(message: Mapping[str, Any]) -> bool:
    """Whether what the assistant says next is in the same message; results of its calls would be
    behind it."""
    return bool(message.get("tool_calls")) or _is_reasoning(message)


def _is_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether nothing was said or called yet after it."""
    return (
        "reasoning_content" in message and not message["content"] and not message.get("tool_calls")
    )

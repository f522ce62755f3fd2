"""The requests of Anthropic's Messages API, as the chats they are here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from deployments.anthropic.billing import BILLING, is_billed
from deployments.anthropic.content import (
    PARAM,
    InputMessages,
    Texts,
    chat_messages,
    system_text,
    texts_of,
)
from deployments.generation import REASONING_EFFORT, THINKING_SWITCHES
from deployments.openai.body import Body, ClosedBody, Integer, Truth
from deployments.openai.kinds import only_kinds, unsupported
from deployments.openai.messages import UncountedMessages
from deployments.openai.protocol import OF_RESPONSES, ChatBody, Speculation
from deployments.openai.request_body import OfferedBody
from deployments.openai.responses_protocol import OF_CHATS
from deployments.openai.sampling_fields import SamplingFields
from deployments.openai.structured import Schema
from deployments.openai.thinking import Thinking
from deployments.openai.tools import MAX_TOOLS
from hdserve.errors import InvalidRequest, Unsupported

PARAM_NAMES: Mapping[str, str] = {
    "parallel_tool_calls": "tool_choice",
    "stop": "stop_sequences",
}
"""What a request of this API calls parameters of a chat that it calls otherwise."""

_VARIABLES: Mapping[str, Collection[str]] = {
    "thinking": THINKING_SWITCHES,
    "output_config.effort": (REASONING_EFFORT,),
}
"""The variables of chat templates, in any of which a parameter is met."""

_SAME_AS_CHAT = ("model", "max_tokens", *SamplingFields.model_fields)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesTool(Body):
    """A function the model may call."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "cache_control", "eager_input_streaming"}
    )

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: Mapping[str, Any]
    strict: Truth | None = None
    defer_loading: Truth | None = None
    input_examples: Annotated[tuple[Mapping[str, Any], ...], Field(fail_fast=True)] | None = None

    @property
    def unmet(self) -> set[str]:
        """What is asked in vain: every tool is shown, and no chat template shows examples."""
        names = ("defer_loading", "input_examples")
        return {f"tools.{name}" for name in names if getattr(self, name)}

    def for_chat(self) -> dict[str, Any]:
        """Return the tool as a chat has it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": function}


MessagesTools = Annotated[
    tuple[Annotated[MessagesTool, only_kinds("tools", {"custom"}, "tools")], ...],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]


class ToolChoice(ClosedBody):
    """Which tool is called, if any."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Truth | None = None

    def for_chat(self) -> Any:
        """Return the ``tool_choice`` of a chat.

        Raises:
            InvalidRequest: a tool is to be called that is not named, or one is named for nothing.
        """
        if (self.name is None) is (self.type == "tool"):
            reason = "tool_choice has a name where its type is 'tool', and nowhere else"
            raise InvalidRequest(reason, "tool_choice")
        if self.type != "tool":
            return _CHOICES[self.type]
        return {"type": "function", "function": {"name": self.name}}


class OutputFormat(ClosedBody):
    """The form of the answer, which is held as far as it can be."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(ClosedBody):
    """How much effort the answer is worth, and its form; no model is told of a budget."""

    task_budget: Mapping[str, Any] | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class _Chat(ChatBody):
    """The chat that a request of this API is, whose errors name ``output_config`` where the form is
    wrong."""

    format_param: ClassVar[str] = "output_config"
    schema_path: ClassVar[str] = "output_config.format.schema"
    parameters_name: ClassVar[str] = "input_schema"

    messages: UncountedMessages = Field(min_length=1)


class CountTokensBody(OfferedBody):
    """``POST /v1/messages/count_tokens``."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "compaction": (),
        "container": (),
        "fallbacks": ([],),
        "mcp_servers": ([],),
        "output_format": (),
        "thread": (),
        **{
            name: neutral
            for name, neutral in {**OF_CHATS, **OF_RESPONSES}.items()
            if name not in ("context_management", "max_tokens", "messages")
        },
    }

    instead: ClassVar[Mapping[str, str]] = {"output_format": "send it as output_config.format"}

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "cache_control",
            "billing_policy",
            "diagnostics",
            "fallback_credit_token",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    )

    messages: InputMessages
    system: str | Texts | None = None
    tools: MessagesTools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    @property
    def param_names(self) -> Mapping[str, str]:
        return PARAM_NAMES

    @property
    def unmet(self) -> frozenset[str]:
        """Beside what all requests may ask in vain: nothing is taken out of a conversation, and
        calls are held to a strict tool's parameters only as in a chat."""
        thinking = self.thinking.unmet if self.thinking is not None else set[str]()
        choice = self.tool_choice.type if self.tool_choice is not None else None
        is_free = choice in {None, "auto"} and self.output_format is None
        asked = {
            "context_management": bool(self.context_management),
            "output_config.task_budget": self.output_config is not None
            and self.output_config.task_budget is not None,
            f"system.{BILLING}": is_billed(texts_of(self.system)),
            "tools.strict": is_free and any(tool.strict for tool in self.tools or ()),
        }
        said = {name for message in self.messages for name in message.unmet}
        said |= {name for tool in self.tools or () for name in tool.unmet}
        return super().unmet.union(
            said, thinking, (name for name, is_asked in asked.items() if is_asked)
        )

    @property
    def left_out(self) -> Mapping[str, Unsupported]:
        """What another server did itself, and what came of tools that is no text."""
        return {
            name: unsupported("content blocks", kind, PARAM)
            for message in self.messages
            for name, kind in message.left_out
        }

    @property
    def output_format(self) -> OutputFormat | None:
        """The form that the answer is held to."""
        return self.output_config.format if self.output_config is not None else None

    @property
    def is_one_call(self) -> bool:
        """Whether at most one call is wanted."""
        return self.tool_choice is not None and bool(self.tool_choice.disable_parallel_tool_use)

    def to_chat(self) -> ChatBody:
        """Return the chat this is; errors name its parameters, see :data:`PARAM_NAMES`.

        Raises:
            InvalidRequest: a value is wrong.
        """
        return _Chat.parse(
            {name: value for name, value in self._chat().items() if value is not None}
        )

    def _chat(self) -> dict[str, Any]:
        messages = [*self._messages()]
        if not messages:
            raise InvalidRequest("no message has content", PARAM)
        *earlier, last = messages
        has_text = bool((last.get("content") or "").strip())
        if earlier and last["role"] == "assistant" and not (has_text or last.get("tool_calls")):
            messages = earlier  # there is nothing to go on with
        if messages[-1].get("tool_calls"):
            raise InvalidRequest("the results of the last message's calls are missing", PARAM)
        form = self.output_format
        schema = None if form is None else {"name": "output", "schema": form.schema_}
        return {
            "model": self.model,
            "messages": messages,
            "continue_final_message": messages[-1]["role"] == "assistant",
            "tools": None if self.tools is None else [tool.for_chat() for tool in self.tools],
            "tool_choice": None if self.tool_choice is None else self.tool_choice.for_chat(),
            "parallel_tool_calls": False if self.is_one_call else None,
            "response_format": schema and {"type": "json_schema", "json_schema": schema},
            "chat_template_kwargs": {**self._options(), **(self.chat_template_kwargs or {})},
        }

    def _messages(self) -> Iterator[dict[str, Any]]:
        system = system_text(self.system)
        if system:
            yield {"role": "system", "content": system}
        yield from chat_messages(self.messages)

    @property
    def variables(self) -> Mapping[str, Collection[str]]:
        asked = {"thinking": self.thinking, "output_config.effort": self._effort}
        return {name: _VARIABLES[name] for name, value in asked.items() if value is not None}

    @property
    def _effort(self) -> str | None:
        return self.output_config.effort if self.output_config is not None else None

    def _options(self) -> dict[str, Any]:
        """Return the variables of chat templates that say whether, and how much, to think; those
        that a template does not know change nothing."""
        is_to_think = self.thinking is not None and self.thinking.is_wanted
        values = {"thinking": is_to_think, "output_config.effort": self._effort}
        return {name: values[param] for param, names in self.variables.items() for name in names}


class MessagesBody(CountTokensBody, SamplingFields):
    """``POST /v1/messages``."""

    max_tokens: Integer = Field(ge=1)
    stop_sequences: Annotated[tuple[str, ...], Field(fail_fast=True)] | None = None
    stream: Truth | None = None
    speculation: Speculation | None = None

    def _chat(self) -> dict[str, Any]:
        found = super()._chat()
        found |= self.model_dump(include={*_SAME_AS_CHAT})
        found["stop"] = self.stop_sequences
        if self.speculation is not None:
            found["speculation"] = self.speculation.model_dump()
        return found

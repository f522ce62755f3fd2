"""The parameters by which a client offers tools and says which the model must call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from deployments.openai.body import Body, ClosedBody, Truth
from deployments.openai.held_schema import held_schema
from deployments.openai.kinds import named_kind, only_kinds
from deployments.openai.messages import MAX_MESSAGES
from deployments.openai.structured import Constraint
from deployments.parsers.tool_parser import Function, MakeParser, ToolParser
from hdserve import grammar
from hdserve.errors import InvalidRequest, Unsupported
from hdserve.schema import MAX_UNHELD, check_size

MAX_TOOLS = MAX_MESSAGES
"""The most tools: clients with many servers of tools have more than OpenAI's 128.  All share the
parts that a body may have, and they take as long to read as that many messages."""


class FunctionDefinition(Body):
    """``function`` of a tool, to whose parameters a call that is required is held; what of them
    cannot be held is left out, unless they are ``strict``."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: Truth | None = None

    def call_parameters(self) -> Mapping[str, Any]:
        """Return the schema of the arguments of a call, which are an object; of no arguments, where
        it has no ``parameters``.  Those that are elsewhere say so themselves.

        Raises:
            InvalidRequest: they can be no object.
        """
        if self.parameters is None:
            return {"type": "object", "additionalProperties": False}
        if "$ref" in self.parameters:  # beside which the grammar takes little else
            return self.parameters
        declared = self.parameters.get("type", "object")
        if declared != "object" and not (isinstance(declared, list) and "object" in declared):
            reason = f"the parameters of {self.name!r} must be a schema of type object"
            raise InvalidRequest(reason, "tools")
        return {**self.parameters, "type": "object"}

    def described(self) -> dict[str, Any]:
        """Return its documented fields that are set."""
        return self.model_dump(include={*FunctionDefinition.model_fields}, exclude_none=True)


class Tool(Body):
    """A function the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        return {"type": self.type, "function": self.function.described()}


class FunctionName(ClosedBody):
    """Which function is meant."""

    name: str


class NamedTool(ClosedBody):
    """The one function to call."""

    type: Literal["function"]
    function: FunctionName


ONLY_FUNCTIONS = only_kinds("choices of tools", {"function"}, "tool_choice")


class AllowedTools(ClosedBody):
    """Which of the tools may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        tuple[Annotated[NamedTool, ONLY_FUNCTIONS], ...],
        Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True),
    ]


class AllowedToolsChoice(ClosedBody):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


# Brackets tell forms of a value from its fields where an error is told.
def form_of_choice(choice: Any) -> str | None:
    """Return the form of a ``tool_choice`` that is an object."""
    if not isinstance(choice, Mapping):
        return None
    return "[allowed tools]" if named_kind(choice) == "allowed_tools" else "[function]"


ONLY_CHOICES = only_kinds("choices of tools", {"function", "allowed_tools"}, "tool_choice")

Tools = Annotated[
    tuple[Annotated[Tool, only_kinds("tools", {"function"}, "tools")], ...],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]


def check_tools(tools: Tools | None) -> None:
    """
    Raises:
        InvalidRequest: the parameters of all tools are too large: also where no grammar is made of
            them, templates write them, and so do some answers.
    """
    try:
        check_size([tool.function.parameters for tool in tools or ()])
    except ValueError as error:
        raise InvalidRequest(f"the parameters of tools: {error}", "tools") from error


class ToolFields(BaseModel):
    """The parameters of a chat that are about tools."""

    parameters_name: ClassVar[str] = "parameters"
    """The name that the client knows the parameters of a function by."""

    tools: Tools | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"]
            | Annotated[
                Annotated[NamedTool, Tag("[function]")]
                | Annotated[AllowedToolsChoice, Tag("[allowed tools]")],
                Discriminator(form_of_choice),
            ],
            ONLY_CHOICES,
        ]
        | None
    ) = None
    parallel_tool_calls: Truth | None = None

    @property
    def may_call_tools(self) -> bool:
        """Whether the model is shown the tools, and its calls are read."""
        return bool(self.tools) and self.call_mode != "none"

    @property
    def call_mode(self) -> Literal["none", "auto", "required"]:
        """Whether the model may call nothing, may call or answer, or must call."""
        if isinstance(self.tool_choice, NamedTool):
            return "required"
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice or "auto"

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that ``tool_choice`` leaves to be called."""
        chosen = self._chosen_names()
        names = None if chosen is None else frozenset(chosen)
        return tuple(
            tool for tool in self.tools or () if names is None or tool.function.name in names
        )

    @property
    def names_tool(self) -> bool:
        """Whether the request says which function is called."""
        return isinstance(self.tool_choice, NamedTool)

    def template_tools(self) -> tuple[Mapping[str, Any], ...]:
        """Return the tools as chat templates take them.

        Where a call is required, a grammar holds it, and all are shown, so that prompts begin as
        those with other choices do.  Else a model knows by what it is shown what it may call.
        """
        if not self.may_call_tools:
            return ()
        shown = self.tools or () if self.call_mode == "required" else self.callable_tools
        return tuple(tool.for_template() for tool in shown)

    def answer_parser(self, parser: type[ToolParser] | None) -> MakeParser | None:
        """Return a function that makes the parser of an answer's calls; ``None`` where all of it is
        text."""
        if parser is None or not self.may_call_tools:
            return None
        known = [
            Function(tool.function.name, tool.function.parameters or {})
            for tool in self.callable_tools
        ]
        return partial(parser, known)

    def tool_constraint(self, parser: type[ToolParser] | None) -> Constraint | None:
        """Return what the output must match, because a call is required.

        Args:
            parser: reads the calls of the model; ``None`` where nothing can.

        Raises:
            Unsupported: there are tools, but nothing that reads calls.
            InvalidRequest: a chosen tool is not among the tools, or the parameters of one can be no
                object, or are strict and cannot be held, or all are too large.
        """
        check_tools(self.tools)
        if self.tool_choice in {None, "none", "auto"} and not self.may_call_tools:
            return None
        if not self.tools:
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        if parser is None:
            raise Unsupported(
                "tool calls of this model cannot be read: its chat template asks for none, or in a "
                "way that is not known; `chat_template` and `tool_parser` of its configuration can "
                "name others",
                "tools",
            )
        functions = self._functions()
        if self.call_mode != "required":
            return None
        return self._calls(functions, parser)

    def or_calls(self, constraint: Constraint, parser: type[ToolParser] | None) -> Constraint:
        """Return ``constraint``, or calls, where the model may make some instead of answering.

        Raises:
            InvalidRequest: the parameters of tools are too deep, are strict and cannot be held, or
                can be no object.
        """
        if parser is None or not self.tools or self.call_mode != "auto":
            return constraint
        calls = self._calls(self._functions(), parser)
        either = grammar.either(calls.grammar, constraint.grammar)
        return Constraint(either, constraint.param, constraint.unheld + calls.unheld)

    def _calls(self, functions: list[Function], parser: type[ToolParser]) -> Constraint:
        is_one = self.names_tool or self.parallel_tool_calls is False
        strict = {tool.function.name for tool in self.tools or () if tool.function.strict}
        try:
            held = [self._held(function, strict) for function in functions]
            text = parser.grammar([function for function, _ in held], is_one=is_one)
        except RecursionError as error:
            raise InvalidRequest("the parameters of a tool are too deep", "tools") from error
        except ValueError as error:
            raise InvalidRequest(f"the parameters of a tool: {error}", "tools") from error
        unheld = chain.from_iterable(paths for _, paths in held)
        return Constraint(text, "tools", tuple(islice(unheld, MAX_UNHELD)))

    def _held(self, function: Function, strict: set[str]) -> tuple[Function, tuple[str, ...]]:
        """Return a function with what is held of its parameters, and the paths of what is not.

        Args:
            strict: the names of those that are strict.

        Raises:
            InvalidRequest: they are too large or too deep, or a reference leads to itself.
            Unsupported: they are strict and cannot be held.
        """
        path = f"tools.{function.name}.{self.parameters_name}"
        is_strict = function.name in strict
        try:
            schema, unheld = held_schema(function.parameters, path, is_strict=is_strict)
        except ValueError as error:
            reason = f"the parameters of {function.name!r}: {error}"
            raise InvalidRequest(reason, "tools") from error
        if "$ref" not in schema:
            schema = {**schema, "type": "object"}
        return Function(function.name, schema), unheld

    def _functions(self) -> list[Function]:
        """Return what may be called.

        Raises:
            InvalidRequest: see :meth:`tool_constraint`.
        """
        functions = [
            Function(tool.function.name, tool.function.call_parameters())
            for tool in self.tools or ()
        ]
        chosen = self._chosen_names()
        if chosen is None:
            return functions
        known = {function.name for function in functions}
        for name in chosen:
            if name not in known:
                raise InvalidRequest(f"there is no tool {name[:64]!r}", "tool_choice")
        names = frozenset(chosen)
        return [function for function in functions if function.name in names]

    def _chosen_names(self) -> tuple[str, ...] | None:
        """Return the functions that ``tool_choice`` names; ``None`` where it names none."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return (choice.function.name,)
        if isinstance(choice, AllowedToolsChoice):
            return tuple(tool.function.name for tool in choice.allowed_tools.tools)
        return None

"""The parameters of a request of the Responses API that are about tools, and the functions of a
chat that they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Discriminator, Field, Tag

from deployments.openai.body import Body, ClosedBody, Truth
from deployments.openai.kinds import named_kind, only_kinds, unsupported
from deployments.openai.left_out import LeftOut
from deployments.openai.tools import (
    MAX_TOOLS,
    ONLY_CHOICES,
    ONLY_FUNCTIONS,
    FunctionDefinition,
    FunctionName,
    form_of_choice,
)
from hdserve.errors import InvalidRequest

_THINGS = "tools"
_MAX_NAME_CHARACTERS = 128

LEFT_OUT_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""The types of tools that are no functions.  A model has learned to call functions alone, and most
of the others the server would have to run."""


class FunctionTool(FunctionDefinition):
    """A function the model may call."""

    type: Literal["function"]

    def shown(self) -> dict[str, Any]:
        """Return the tool as the answer repeats it."""
        return self.model_dump(include={*FunctionTool.model_fields})


# Brackets tell forms of a value from its fields where an error is told.
def _form(tool: Any) -> str:
    kind = named_kind(tool)
    if kind in LEFT_OUT_TOOLS:
        return "[left out]"
    return "[namespace]" if kind == "namespace" else "[function]"


class Namespace(Body):
    """Functions that have a name together, as agents group those of a server of tools."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: Annotated[
        tuple[
            Annotated[
                Annotated[FunctionTool, Tag("[function]")] | Annotated[LeftOut, Tag("[left out]")],
                Discriminator(_form),
                only_kinds(_THINGS, {"function", *LEFT_OUT_TOOLS}, _THINGS),
            ],
            ...,
        ],
        Field(fail_fast=True),
    ]

    def shown(self) -> dict[str, Any]:
        """Return the tool as the answer repeats it."""
        head = {"type": self.type, "name": self.name, "description": self.description}
        functions = [tool.shown() for tool in self.tools if isinstance(tool, FunctionTool)]
        return {**head, "tools": functions}


Tool = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[Namespace, Tag("[namespace]")]
    | Annotated[LeftOut, Tag("[left out]")],
    Discriminator(_form),
    only_kinds(_THINGS, {"function", "namespace", *LEFT_OUT_TOOLS}, _THINGS),
]


class NamedFunction(FunctionName):
    """The one function to call."""

    type: Literal["function"]


class AllowedFunctions(ClosedBody):
    """Which of the functions may be called, and whether one must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        tuple[Annotated[NamedFunction, ONLY_FUNCTIONS], ...],
        Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True),
    ]


class OwnName(NamedTuple):
    """What a client calls a function."""

    namespace: str | None
    name: str


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a function; agents that know no namespaces make it
    in the same way."""
    return f"{namespace}__{name}" if namespace else name


class ResponseToolFields(BaseModel):
    """The parameters of a request that are about tools."""

    tools: Annotated[tuple[Tool, ...], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"]
            | Annotated[
                Annotated[NamedFunction, Tag("[function]")]
                | Annotated[AllowedFunctions, Tag("[allowed tools]")],
                Discriminator(form_of_choice),
            ],
            ONLY_CHOICES,
        ]
        | None
    ) = None
    parallel_tool_calls: Truth | None = None

    @property
    def functions(self) -> tuple[FunctionTool, ...]:
        """All functions, those of namespaces included."""
        return tuple(function for _, _, function in self._functions())

    @property
    def free_functions(self) -> tuple[FunctionTool, ...]:
        """The functions that the model may call, where it need not call any."""
        choice = self.tool_choice
        if not isinstance(choice, AllowedFunctions):
            return self.functions if choice in {None, "auto"} else ()
        if choice.mode != "auto":
            return ()
        called = self._called()
        names = {called.get(each.name, each.name) for each in choice.tools}
        return tuple(function for name, _, function in self._functions() if name in names)

    @property
    def own_names(self) -> dict[str, OwnName]:
        """What the client calls the functions of its namespaces, by what the model calls them."""
        return {
            name: OwnName(group.name, function.name)
            for name, group, function in self._functions()
            if group is not None
        }

    @property
    def left_out_tools(self) -> tuple[str, ...]:
        """The types of the tools that the model is not told of."""
        groups = [tool.tools if isinstance(tool, Namespace) else (tool,) for tool in self._tools]
        found = [tool.type for group in groups for tool in group if isinstance(tool, LeftOut)]
        return tuple(dict.fromkeys(found))

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as the answer repeats them: those that the model was told of."""
        return [tool.shown() for tool in self._tools if not isinstance(tool, LeftOut)]

    def tools_for_chat(self) -> dict[str, Any]:
        """Return the fields of a chat.

        Raises:
            Unsupported: a call is required, and all tools are left out.
            InvalidRequest: the model would call two functions the same, or one by too long a name.
        """
        if self.tools is None:
            return {"tool_choice": self._choice()}
        tools = [*self._tools_for_chat()]
        if self.tool_choice == "required" and self.left_out_tools and not tools:
            raise unsupported(_THINGS, self.left_out_tools[0], _THINGS)
        return {"tools": tools, "tool_choice": self._choice()}

    @property
    def _tools(self) -> tuple[FunctionTool | Namespace | LeftOut, ...]:
        return self.tools or ()

    def _functions(self) -> Iterator[tuple[str, Namespace | None, FunctionTool]]:
        """Yield what the model calls each function, the namespace it is in, and the function."""
        for tool in self._tools:
            if isinstance(tool, FunctionTool):
                yield tool.name, None, tool
            elif isinstance(tool, Namespace):
                for function in tool.tools:
                    if isinstance(function, FunctionTool):
                        yield full_name(tool.name, function.name), tool, function

    def _tools_for_chat(self) -> Iterator[dict[str, Any]]:
        """Yield the functions.  What is said of a namespace stands before what is said of the first
        of its functions."""
        self._check_names()
        told: set[int] = set()
        for name, group, function in self._functions():
            described = {**function.described(), "name": name}
            if group is not None and group.description and id(group) not in told:
                texts = (group.description, function.description)
                described["description"] = "\n\n".join(filter(None, texts))
                told.add(id(group))
            yield {"type": "function", "function": described}

    def _check_names(self) -> None:
        counts = Counter(name for name, _, _ in self._functions())
        for name, group, _ in self._functions():
            if group is None:
                continue
            if counts[name] > 1:
                raise InvalidRequest(f"two functions would be called {name[:150]!r}", _THINGS)
            if len(name) > _MAX_NAME_CHARACTERS:
                raise InvalidRequest(
                    f"the name of a namespace and that of a function in it have more than "
                    f"{_MAX_NAME_CHARACTERS} characters together: {name[:150]!r}",
                    _THINGS,
                )

    def _choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            return self._chosen([choice])[0]
        if isinstance(choice, AllowedFunctions):
            allowed = {"mode": choice.mode, "tools": self._chosen(choice.tools)}
            return {"type": choice.type, "allowed_tools": allowed}
        return choice

    def _chosen(self, functions: Iterable[NamedFunction]) -> list[dict[str, Any]]:
        """Return functions that a client chose as a chat names them."""
        called = self._called()
        names = [called.get(function.name, function.name) for function in functions]
        return [{"type": "function", "function": {"name": name}} for name in names]

    def _called(self) -> dict[str, str]:
        """Return what the model calls the functions that a client can choose by their names alone:
        those beside namespaces, and of those in namespaces the ones that no other is called
        like."""
        own_names = self.own_names
        counts = Counter(own.name for own in own_names.values())
        found = {own.name: full for full, own in own_names.items() if counts[own.name] == 1}
        beside = [name for name, group, _ in self._functions() if group is None]
        return found | dict(zip(beside, beside, strict=True))

"""Structured output: the parameters by which clients ask for it, as one grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, Field, model_validator

from deployments.openai.body import ClosedBody, Truth
from deployments.openai.json_text import parse_json
from hdserve import grammar
from hdserve.errors import InvalidRequest, Unsupported

Schema = Mapping[str, Any]
MakeGrammar = Callable[[], str]
Choices = Annotated[tuple[str, ...], Field(min_length=1, max_length=1000, fail_fast=True)]


class JsonSchema(ClosedBody):
    """``json_schema`` of a response format; ``strict`` or not, the schema is always held."""

    name: str
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: Truth | None = None


class ResponseFormat(ClosedBody):
    """``response_format`` of the OpenAI API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def form(self, param: str) -> MakeGrammar | None:
        """Return a function that makes the grammar; ``None`` where any text will do.

        Args:
            param: what the client calls it.

        Raises:
            InvalidRequest: ``json_schema`` is missing.
        """
        if self.type == "json_schema":
            if self.json_schema is None:
                raise InvalidRequest(f"{param}.json_schema is missing", param)
            return partial(_of_schema, self.json_schema.schema_, param)
        return grammar.json_object if self.type == "json_object" else None


class StructuredOutputs(ClosedBody):
    """``structured_outputs`` of vLLM; exactly one of its fields."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "grammar": (),
        "structural_tag": (),
        "whitespace_pattern": (),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "disable_fallback": (False,),
    }
    """Fields of vLLM that are not offered, with the values that change nothing."""

    json_: Schema | str | None = Field(default=None, alias="json")
    json_object: Truth | None = None
    regex: str | None = None
    choice: Choices | None = None

    @model_validator(mode="before")
    @classmethod
    def _offered(cls, data: Any) -> Any:
        """Return the fields that are read.

        Raises:
            Unsupported: one that is not offered is set.
        """
        if not isinstance(data, Mapping):
            return data
        for name, neutral in cls.unsupported.items():
            value = data.get(name)
            if value is not None and value not in neutral:
                reason = f"structured_outputs.{name} is not supported"
                raise Unsupported(reason, "structured_outputs")
        return {name: value for name, value in data.items() if name not in cls.unsupported}

    def forms(self, param: str = "structured_outputs") -> list[MakeGrammar]:
        """Return a function for each field that is set, which makes its grammar."""
        found: list[MakeGrammar] = []
        if self.json_ is not None:
            found.append(partial(_of_schema, self.json_, param))
        if self.json_object:
            found.append(grammar.json_object)
        if self.regex is not None:
            found.append(partial(grammar.regex, self.regex))
        if self.choice is not None:
            found.append(partial(grammar.choice, self.choice))
        return found


class Constraint(NamedTuple):
    """A grammar and the parameter that asked for it."""

    grammar: str
    param: str


class _Demand(NamedTuple):
    """A parameter that asks for a form, and what makes its grammar, which of a large schema takes
    time."""

    make_grammar: MakeGrammar
    param: str


class StructuredFields(BaseModel):
    """The parameters of a generation request that hold its output to a form."""

    format_param: ClassVar[str] = "response_format"
    """The name that the client knows ``response_format`` by."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None

    @property
    def asks_for_form(self) -> bool:
        """Whether the output is held to a form."""
        has_format = self.response_format is not None and self.response_format.type != "text"
        extensions = (
            self.structured_outputs,
            self.guided_json,
            self.guided_regex,
            self.guided_choice,
        )
        return has_format or any(form is not None for form in extensions)

    def constraint(self) -> Constraint | None:
        """Return what the output must match; ``None`` is any text.

        Raises:
            InvalidRequest: there is more than one demand, or one is incomplete.
        """
        demands = self._demands()
        _check_is_one(demands)
        return next((Constraint(item.make_grammar(), item.param) for item in demands), None)

    def _demands(self) -> list[_Demand]:
        found = []
        if self.response_format:
            form = self.response_format.form(self.format_param)
            found += [] if form is None else [_Demand(form, self.format_param)]
        if self.structured_outputs:
            forms = self.structured_outputs.forms()
            if not forms:
                raise InvalidRequest("structured_outputs names no form", "structured_outputs")
            found += [_Demand(form, "structured_outputs") for form in forms]
        for name in ("json", "regex", "choice"):
            value = getattr(self, f"guided_{name}")
            if value is not None:
                param = f"guided_{name}"
                (form,) = StructuredOutputs.model_validate({name: value}).forms(param)
                found.append(_Demand(form, param))
        return found


def one_of(*constraints: Constraint | None) -> Constraint | None:
    """Return the one constraint that there is, if any.

    Raises:
        InvalidRequest: there are several.
    """
    found = [constraint for constraint in constraints if constraint is not None]
    _check_is_one(found)
    return found[0] if found else None


def _check_is_one(found: Sequence[Constraint | _Demand]) -> None:
    """
    Raises:
        InvalidRequest: there are several.
    """
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(item.param for item in found[:2]))
        raise InvalidRequest(f"{names}: an output can be held to one form", found[1].param)


def _schema(data: Schema | str, param: str) -> Schema:
    """Return a schema, or the one that a text spells."""
    if not isinstance(data, str):
        return data
    try:
        schema = parse_json(data.encode())
    except (InvalidRequest, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{param}: not valid JSON", param) from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: a JSON object is expected", param)
    return schema


def _of_schema(schema: Schema | str, param: str) -> str:
    try:
        return grammar.json_schema(_schema(schema, param))
    except ValueError as error:
        raise InvalidRequest(str(error), param) from error

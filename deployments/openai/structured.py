"""Structured output: the parameters by which clients ask for it, as one grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, Field, model_validator

from deployments.openai.body import ClosedBody, Truth
from deployments.openai.held_schema import held_schema
from deployments.openai.json_text import parse_json
from hdserve import grammar
from hdserve.errors import InvalidRequest, Unsupported

Schema = Mapping[str, Any]
Choices = Annotated[tuple[str, ...], Field(min_length=1, max_length=1000, fail_fast=True)]


class Constraint(NamedTuple):
    """What output must match.

    Attributes:
        grammar: of the output.
        param: the parameter that asked for it.
        unheld: the paths in the request of keywords of its schemas that it does not hold.
    """

    grammar: str
    param: str
    unheld: tuple[str, ...] = ()


MakeConstraint = Callable[[], Constraint]
"""Makes a grammar, which of a large schema takes time."""


class JsonSchema(ClosedBody):
    """``json_schema`` of a response format: a schema of which, unless it is ``strict``, what cannot
    be held is left out.  Without one it is any JSON object."""

    name: str
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: Truth | None = None


class ResponseFormat(ClosedBody):
    """``response_format`` of the OpenAI API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def form(self, path: str) -> MakeConstraint | None:
        """Return a function that makes the constraint; ``None`` where any text will do.

        Args:
            path: of its schema, as the client has it.

        Raises:
            InvalidRequest: ``json_schema`` is missing.
        """
        if self.type == "text":
            return None
        param = path.partition(".")[0]
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidRequest(f"{param}.json_schema is missing", param)
        if self.json_schema is None or self.json_schema.schema_ is None:
            return partial(_plain, grammar.json_object, param)
        is_strict = bool(self.json_schema.strict)
        return partial(_of_schema, self.json_schema.schema_, path, is_strict=is_strict)


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

    def forms(self, path: str = "structured_outputs.json") -> list[MakeConstraint]:
        """Return a function for each field that is set, which makes its constraint.

        Args:
            path: of its schema, as the client has it.
        """
        param = path.partition(".")[0]
        found: list[MakeConstraint] = []
        if self.json_ is not None:
            found.append(partial(_of_schema, self.json_, path, is_strict=False))
        if self.json_object:
            found.append(partial(_plain, grammar.json_object, param))
        if self.regex is not None:
            found.append(partial(_plain, partial(grammar.regex, self.regex), param))
        if self.choice is not None:
            found.append(partial(_plain, partial(grammar.choice, self.choice), param))
        return found


class _Demand(NamedTuple):
    """A parameter that asks for a form, and what makes its constraint."""

    make: MakeConstraint
    param: str


class StructuredFields(BaseModel):
    """The parameters of a generation request that hold its output to a form."""

    format_param: ClassVar[str] = "response_format"
    """The name that the client knows ``response_format`` by."""

    schema_path: ClassVar[str] = "response_format.json_schema.schema"
    """Where the client has the schema of ``response_format``."""

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
        return demands[0].make() if demands else None

    def _demands(self) -> list[_Demand]:
        found = []
        if self.response_format:
            form = self.response_format.form(self.schema_path)
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


def _of_schema(data: Schema | str, path: str, *, is_strict: bool) -> Constraint:
    param = path.partition(".")[0]
    schema = _schema(data, param)
    try:
        found = held_schema(schema, path, is_strict=is_strict)
        return Constraint(grammar.json_schema(found.schema), param, found.unheld)
    except ValueError as error:
        raise InvalidRequest(str(error), param) from error


def _plain(make_grammar: Callable[[], str], param: str) -> Constraint:
    return Constraint(make_grammar(), param)

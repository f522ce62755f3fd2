"""However much of a body is wrong, few errors are made of it: each takes time, of the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from deployments.anthropic.protocol import MessagesBody
from deployments.openai.body import Body, ClosedBody
from deployments.openai.protocol import ChatBody, CompletionBody, TokenizeBody
from deployments.openai.request_body import OfferedBody
from deployments.openai.responses_protocol import ResponsesBody

WRONG: list[tuple[type[OfferedBody], str, Any]] = [
    (ResponsesBody, "include", [1] * 5000),
    (ResponsesBody, "metadata", {f"{index}": 1 for index in range(5000)}),
    (ResponsesBody, "text", {f"{index}": 1 for index in range(5000)}),
    (ChatBody, "logit_bias", {f"k{index}": "x" for index in range(5000)}),
    (ChatBody, "response_format", {f"{index}": 1 for index in range(5000)}),
    (ChatBody, "tool_choice", {f"{index}": 1 for index in range(5000)}),
    (ChatBody, "speculation", {f"{index}": 1 for index in range(5000)}),
    (
        MessagesBody,
        "tools",
        [{"name": "f", "input_schema": {}, "input_examples": [1] * 5000}],
    ),
]


@pytest.mark.parametrize(("kind", "name", "value"), WRONG, ids=[name for _, name, _ in WRONG])
def test_few_errors_are_made(kind: type[OfferedBody], name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({name: value})
    assert any(item["loc"][0] == name for item in caught.value.errors())
    assert caught.value.error_count() < 20


def parts(schema: Any, above: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """The parts of a schema of pydantic, each with the type of the one that it is in."""
    if isinstance(schema, list):
        for item in schema:
            yield from parts(item, above)
    elif isinstance(schema, dict):
        kind = schema.get("type")
        if isinstance(kind, str):
            yield schema, above
        for item in schema.values():
            yield from parts(item, kind if isinstance(kind, str) else above)


def bodies() -> Iterator[type[BaseModel]]:
    waiting: list[type[BaseModel]] = [*Body.__subclasses__(), *ClosedBody.__subclasses__()]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("deployments."):
            yield kind


def test_arrays_are_read_to_the_first_wrong_item() -> None:
    """And objects whose members may be wrong are bounded beforehand."""
    found = {*bodies()}
    assert found >= {ChatBody, CompletionBody, MessagesBody, ResponsesBody, TokenizeBody}
    for kind in found:
        for schema, above in parts(kind.__pydantic_core_schema__):
            if schema["type"] in {"frozenset", "generator", "list", "set", "tuple"}:
                assert schema.get("fail_fast"), (kind, schema)
            elif schema["type"] == "dict":
                values = schema.get("values_schema", {"type": "any"})
                is_free = schema["keys_schema"]["type"] == "str" and values["type"] == "any"
                assert is_free or above == "function-before", (kind, schema)

"""Labels of requests are short: a stream of the Responses API repeats them three times."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.openai.protocol import ChatBody, CompletionBody
from deployments.openai.request_body import RequestBody
from deployments.openai.responses_protocol import ResponsesBody
from hdserve.errors import InvalidRequest

BODIES: list[tuple[type[RequestBody], dict[str, Any]]] = [
    (ChatBody, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
    (CompletionBody, {"model": "m", "prompt": "hi"}),
    (ResponsesBody, {"model": "m", "input": "hi"}),
]


@pytest.mark.parametrize(("kind", "fields"), BODIES)
@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ({"metadata": {"a" * 65: "b"}}, "names of at most 64 characters are"),
        ({"metadata": {"a": "b", "c": "é" * 513}}, "values of at most 512 characters are"),
        (
            {"metadata": {f"{index}": "a" for index in range(1025)}},
            "an object of at most 1024 members is",
        ),
        ({"user": "a" * 1025}, "a string of at most 1024 characters is"),
        ({"safety_identifier": "a" * 1025}, "a string of at most 1024 characters is"),
        ({"prompt_cache_key": "a" * 1025}, "a string of at most 1024 characters is"),
    ],
)
def test_long_labels_are_refused(
    kind: type[RequestBody], fields: dict[str, Any], label: dict[str, Any], reason: str
) -> None:
    (name,) = label
    with pytest.raises(InvalidRequest) as caught:
        kind.parse(fields | label)
    assert (caught.value.message, caught.value.param) == (f"{name}: {reason} expected", name)


@pytest.mark.parametrize(("kind", "fields"), BODIES)
def test_labels_of_the_usual_length_are_accepted(
    kind: type[RequestBody], fields: dict[str, Any]
) -> None:
    """Up to the limits, which count characters and not bytes."""
    names = ("user", "safety_identifier", "prompt_cache_key")
    members = {f"{index}".rjust(64, "é"): "🙂" * 512 for index in range(1024)}
    labels = {**dict.fromkeys(names, "é" * 1024), "metadata": members}
    assert not kind.parse(fields | labels).ignored

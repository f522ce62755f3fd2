"""Errors name parameters as the request does, and leave what is the client's own as it is."""

from __future__ import annotations

import pytest

from deployments.http.param_names import params_named
from hdserve.errors import InvalidRequest, PromptTooLong, RequestError

NAMES = {"max_tokens": "max_output_tokens", "effort_level": "effort.level", "stop": "endings"}


def renamed(error: RequestError) -> RequestError:
    with pytest.raises(type(error)) as caught, params_named(NAMES):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("max_tokens must be at least 1", "max_output_tokens must be at least 1"),
        ("max_tokens: an integer is expected", "max_output_tokens: an integer is expected"),
        ("min_tokens is larger than max_tokens", "min_tokens is larger than max_output_tokens"),
        ("logprobs: lower max_tokens, or n", "logprobs: lower max_output_tokens, or n"),
        ("this model's user's max_tokens", "this model's user's max_output_tokens"),
        ("lower (max_tokens), or max_tokens.", "lower (max_output_tokens), or max_output_tokens."),
        ("it knows no effort_level", "it knows no effort.level"),
        ("stop: a string is expected", "endings: a string is expected"),
    ],
)
def test_names_of_parameters_are_replaced(message: str, wanted: str) -> None:
    assert renamed(InvalidRequest(message)).message == wanted


@pytest.mark.parametrize(
    "message",
    [
        "there is no tool 'max_tokens'",
        'there is no tool "it\'s max_tokens"',
        r"two functions would be called 'a\'s \"max_tokens\"'",
        "two functions would be called 'aaaa max_tokens aaa",
        "`max_tokens` of the configuration",
        "the model 'm' does not exist; there are: max_tokens",
        "the grammar cannot be used: rule max_tokens is not defined",
        "the model's chat template refuses these messages: set max_tokens",
        "text.format.schema.max_tokens: is unknown",
        "/properties/max_tokens is unknown",
        "max_tokens/max_tokens and max_tokens-max_tokens are unknown",
        "a full stop: that ends it",
        "stop",
    ],
)
def test_what_a_message_quotes_is_left_as_it_is(message: str) -> None:
    assert renamed(InvalidRequest(message)).message == message


@pytest.mark.parametrize("piece", ["'", "'\\", "\\", '"', "`'\"", "-", ".", "a.", "a_b ", " '"])
def test_the_longest_message_takes_no_time(piece: str) -> None:
    """In proportion to its square it would take minutes."""
    message = piece * 50_000
    assert renamed(InvalidRequest(message)).message == message


def test_all_else_of_an_error_stays() -> None:
    error = PromptTooLong("lower max_tokens", "stop", num_tokens=9, max_num_tokens=8)
    found = renamed(error)
    assert isinstance(found, PromptTooLong)
    assert (found.message, str(found)) == ("lower max_output_tokens",) * 2
    assert (found.param, found.num_tokens, found.max_num_tokens) == ("endings", 9, 8)
    assert error.message == "lower max_tokens"

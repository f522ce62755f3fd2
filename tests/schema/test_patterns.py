"""Patterns that grammars cannot take are known as such, and a few are written in other words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from hdserve import grammar
from hdserve.schema.patterns import is_readable, without_look_around

TOKENIZER = LLTokenizer("byte")
HOSTNAME = (
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
)
DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "^a$",
        r"^\d{4}-\d\d$",
        r"[\w\-\.]+@\w+\.\w{2,}",
        r"\u0041\x41\t\n",
        r"\p{L}+[\p{Greek}]",
        "(?:a|b)*",
        "(?i)abc",
        "(?<name>a)(?P<other>b)",
        r"\\b",
        r"[(?=\]]",
        r"\(?=",
        r"[^\]]*",
        "[]a]",
        r"\/\-\_\@\ ",
    ],
)
def test_grammars_take_these(pattern: str) -> None:
    assert is_readable(pattern)
    schema = {"type": "string", "pattern": pattern}
    assert not LLMatcher.validate_grammar(grammar.json_schema(schema))


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)",
        "^(?!a)",
        "(?<=a)b",
        "(?<!a)b",
        r"\bword",
        r"\Bword",
        r"(a)\1",
        r"(?<n>a)\k<n>",
        r"(?P<n>a)(?P=n)",
        "(?>a)",
        "(?#note)a",
        r"\cA",
        r"a\Z",
    ],
)
def test_grammars_take_none_of_these(pattern: str) -> None:
    assert not is_readable(pattern)
    schema = json.dumps({"grammars": [{"json_schema": {"type": "string", "pattern": pattern}}]})
    assert LLMatcher.validate_grammar(schema)


def test_reading_a_pattern_takes_no_long() -> None:
    """Even where a set of characters has no end."""
    assert is_readable("[" * 1_000_000)
    assert is_readable("[" * 1_000_000 + "\\")


def allows(text_format: str, pattern: str, text: str) -> bool:
    """Whether a grammar of the format and the pattern allows a text."""
    schema = {"type": "string", "format": text_format, "pattern": pattern}
    matcher = LLMatcher(TOKENIZER, grammar.json_schema(schema), log_level=0)
    data = json.dumps(text).encode()
    return matcher.try_consume_tokens([*data]) == len(data) and matcher.is_accepting()


def durations() -> Iterator[str]:
    parts = [("", part) for part in ("1Y", "20M", "3D", "T", "4H", "5M", "6S", "7W")]
    return ("P" + "".join(chosen) for chosen in product(*parts))


def test_durations_need_no_look_ahead() -> None:
    """Of zod's pattern the format allows a part, in every way to put a duration together."""
    assert not is_readable(DURATION)
    found = [text for text in durations() if allows("duration", DURATION, text)]
    assert len(found) > 20
    assert all(re.match(DURATION, text) for text in found)


@pytest.mark.parametrize("length", [253, 254])
def test_hostnames_are_of_the_length_that_a_look_ahead_tells(length: int) -> None:
    assert not is_readable(HOSTNAME)
    labels = ".".join(["a" * 63] * 4)
    text = labels[:251] + "." + "b" * (length - 252)
    assert len(text) == length
    assert allows("hostname", HOSTNAME, text) == bool(re.match(HOSTNAME, text)) == (length < 254)


def test_a_shorter_length_stays() -> None:
    schema = {"format": "hostname", "pattern": HOSTNAME, "maxLength": 9}
    assert without_look_around(schema) == {"maxLength": 9}


@given(st.text("aZ0_'+-.@", max_size=12))
def test_addresses_are_those_of_the_look_aheads(text: str) -> None:
    """The two patterns of an address say the same."""
    found = without_look_around({"format": "email", "pattern": EMAIL})
    assert found is not None
    assert bool(re.match(EMAIL, text)) == bool(re.match(found["pattern"], text))
    assert is_readable(found["pattern"])


def test_addresses_are_held() -> None:
    assert allows("email", EMAIL, "a.b@example.org")
    assert not allows("email", EMAIL, "a!b@example.org")
    assert not allows("email", EMAIL, "a..b@example.org")


def test_other_patterns_have_no_other_words() -> None:
    """Nor the same ones beside another format, or none."""
    for schema in (
        {"format": "email", "pattern": "(?=a)"},
        {"pattern": EMAIL},
        {"format": "email"},
    ):
        assert without_look_around(schema) is None

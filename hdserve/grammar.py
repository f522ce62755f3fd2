"""Grammars an output can be held to, in the form of llguidance: JSON that holds grammars.

Nothing here knows a tokenizer; :mod:`hdserve.engine.grammar` compiles them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import LLMatcher

_JSON_OPTIONS = {"whitespace_pattern": r"(\n {0,40}| )?"}
"""Between the parts of a JSON text: nothing, a space, or a new line and its indentation.  JSON
allows endless white space, in which a small model loses itself."""


def json_schema(schema: Mapping[str, Any]) -> str:
    """JSON texts that ``schema`` (JSON Schema) allows, their keys in the schema's order.

    Raises:
        ValueError: the schema is too deep.
    """
    try:
        return json.dumps({"grammars": [{"json_schema": with_json_options(schema)}]})
    except RecursionError as error:
        raise ValueError("the schema is too deep") from error


def json_object() -> str:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Texts that match ``pattern`` as a whole, in the syntax of Rust's ``regex``."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(options: Iterable[str]) -> str:
    """One of ``options``."""
    return lark("start: " + " | ".join(quoted(option) for option in options))


def lark(grammar: str) -> str:
    """Texts of a context-free grammar in the Lark syntax of llguidance; its rule ``start``.

    Not for grammars of clients: an ambiguous one (``x: "a" | x x``) takes more time with each
    token, in the thread that serves everybody.
    """
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


def either(*grammars: str) -> str:
    """Texts of one of several grammars, each made by a function of this module."""
    named = [
        {**form, "name": f"form_{index}"}
        for index, text in enumerate(grammars)
        for form in json.loads(text)["grammars"]
    ]
    start = "start: " + " | ".join(f"@{form['name']}" for form in named)
    return json.dumps({"grammars": [{"lark_grammar": start}, *named]})


def quoted(text: str) -> str:
    """``text`` as a Lark literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # no lexer takes it


def with_json_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """``schema`` with how its JSON texts are to be written, unless it says so itself."""
    return {"x-guidance": _JSON_OPTIONS, **schema}

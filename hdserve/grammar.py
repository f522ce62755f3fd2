"""Grammars for constrained output, in llguidance's form: JSON that contains grammars.

Nothing here knows a tokenizer; :mod:`hdserve.engine.structured_output.grammar` compiles them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from hdserve.errors import InvalidRequest
from hdserve.schema import rewritten
from hdserve.schema.keywords import OPTIONS

_JSON_OPTIONS = {"whitespace_pattern": r"(\n {0,40}| )?"}
"""White space in a JSON text: none, a space, or a newline and its indentation.  JSON allows any
amount, in which a small model loses itself."""

_MARKS, _THOUGHTS = "hdserve_marks", "hdserve_thoughts"


def json_schema(schema: Mapping[str, Any]) -> str:
    """Return a grammar of the JSON texts that ``schema`` (JSON Schema) allows.

    Keys are in the order of the schema.

    Raises:
        ValueError: the schema is too large or too deep, its ``multipleOf`` numbers need too many
            states, a number has too many digits, a keyword cannot be enforced, or a reference
            leads to itself.
    """
    try:
        return json.dumps({"grammars": [{"json_schema": with_json_options(schema)}]})
    except RecursionError as error:
        raise ValueError("the schema is too deep") from error


def json_object() -> str:
    """Return a grammar of any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Return a grammar of texts that ``pattern``, in Rust syntax, matches as a whole.

    Raises:
        InvalidRequest: it has half of a surrogate pair, which is not text.
    """
    try:
        return LLMatcher.grammar_from_regex(pattern)
    except UnicodeEncodeError as error:
        raise InvalidRequest("a pattern has half of a surrogate pair, which is not text") from error


def choice(options: Iterable[str]) -> str:
    """Return a grammar of one of ``options``.

    Raises:
        ValueError: there is none, or ``options`` is one text.
    """
    if isinstance(options, str):
        raise ValueError("options are several texts: of one each character would be an option")
    literals = [quoted(option) for option in options]
    if not literals:
        raise ValueError("a choice needs an option")
    return lark("start: " + " | ".join(literals))


def lark(grammar: str, marks: Mapping[str, str] | None = None) -> str:
    """Return a grammar of the texts of ``start``, a rule in the Lark syntax of llguidance.

    Not for grammars of clients: an ambiguous one (``x: "a" | x x``) takes more time with each
    token, in the thread that serves everybody.

    Args:
        marks: further rules by name, each a text that is one special token if the vocabulary has
            it as such; a literal never is.
    """
    form: dict[str, Any] = {"lark_grammar": grammar}
    return json.dumps({"grammars": [{**form, _MARKS: marks} if marks else form]})


def behind(
    rules: str, answer: str, marks: Mapping[str, str], thoughts: Mapping[str, Sequence[str]]
) -> str:
    """Return a grammar of texts that end in one of another grammar.

    Args:
        rules: those of ``start``, as for :func:`lark`, in which ``@answer`` is the other grammar.
        answer: the other grammar, made by a function of this module.
        marks: as for :func:`lark`.
        thoughts: further rules by their names.  Each is any tokens up to and with the first mark of
            its list; none of them is another mark of the list, or ends the output.
    """
    form = {"lark_grammar": rules, _MARKS: marks, _THOUGHTS: thoughts}
    first, *others = json.loads(answer)["grammars"]
    return json.dumps({"grammars": [form, {**first, "name": "answer"}, *others]})


def with_marks(
    grammar: str,
    special_token_id: Callable[[str], int | None],
    ending_token_ids: Iterable[int] = (),
) -> str:
    """Return ``grammar`` as llguidance takes it, with marks as special tokens of a vocabulary.

    Args:
        special_token_id: the id of a text that is a special token.
        ending_token_ids: those that end the output.
    """
    if f'"{_MARKS}"' not in grammar:
        return grammar
    forms = _forms(grammar)
    if not all(_has_right_marks(form) for form in forms):
        return grammar  # an error will be reported
    for form in forms:
        for name, text in form.pop(_MARKS, {}).items():
            token_id = special_token_id(text)
            mark = quoted(text) if token_id is None else f"<[{token_id}]>"
            form["lark_grammar"] += f"\n{name}: {mark}"
        for name, texts in form.pop(_THOUGHTS, {}).items():
            token_ids = [special_token_id(text) for text in texts]
            form["lark_grammar"] += _thought(name, texts[0], [*token_ids, *ending_token_ids])
    return json.dumps({**json.loads(grammar), "grammars": forms}) if forms else grammar


def _forms(grammar: str) -> list[dict[str, Any]]:
    """The grammars in a text; none if it is invalid."""
    try:
        found = json.loads(grammar)
    except (ValueError, RecursionError):
        return []
    forms = found.get("grammars") if isinstance(found, dict) else None
    if not isinstance(forms, list) or not all(isinstance(form, dict) for form in forms):
        return []
    return forms


def _thought(name: str, mark: str, barred: Sequence[int | None]) -> str:
    """Write the rule of tokens up to ``mark``, which is the first of those that are barred before
    it, or, where it is no token, of text up to it."""
    if barred[0] is None:
        return f"\n{name}[suffix={quoted(mark)}]: /(?s:.*)/"
    others = ",".join(str(token_id) for token_id in barred if token_id is not None)
    return f"\n{name}: {name}_token* <[{barred[0]}]>\n{name}_token: <[^{others}]>"


def _has_right_marks(form: Mapping[str, Any]) -> bool:
    if _MARKS not in form and _THOUGHTS not in form:
        return True
    marks, thoughts = form.get(_MARKS), form.get(_THOUGHTS, {})
    if not isinstance(form.get("lark_grammar"), str):
        return False
    return _are_texts(marks) and _are_lists_of_texts(thoughts)


def _are_texts(named: Any) -> bool:
    return isinstance(named, dict) and all(isinstance(text, str) for text in named.values())


def _are_lists_of_texts(named: Any) -> bool:
    return isinstance(named, dict) and all(
        isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)
        for texts in named.values()
    )


def either(*grammars: str) -> str:
    """Return a grammar of the texts of one of several, each made by a function of this module."""
    named = [
        {**form, "name": f"form_{index}"}
        for index, text in enumerate(grammars)
        for form in json.loads(text)["grammars"]
    ]
    start = "start: " + " | ".join(f"@{form['name']}" for form in named)
    return json.dumps({"grammars": [{"lark_grammar": start}, *named]})


def unforced(grammar: str) -> str:
    """Return ``grammar`` with every matching token allowed, even if only one text is possible.

    Otherwise llguidance then allows only the token that the tokenizer makes of that text, which is
    a special token if the text spells one, and no part of it.
    """
    forms = _forms(grammar)
    if not forms:
        return grammar  # an error will be reported
    first, *others = forms
    start = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @unforced'}
    return json.dumps({"grammars": [start, {**first, "name": "unforced"}, *others]})


def spells_any(grammar: str, texts: Iterable[str]) -> bool:
    """Tell whether one of ``texts`` may occur in a literal, a pattern or a schema of ``grammar``,
    which may be long."""
    bare = grammar.replace("\\", "")
    spellings = {
        json.dumps(text, ensure_ascii=is_ascii)[1:-1].replace("\\", "")
        for text in texts
        for is_ascii in (True, False)
    }
    return any(spelling in bare for spelling in spellings)


def quoted(text: str) -> str:
    """Write ``text`` as a Lark literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # lexers refuse it


def with_json_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``schema``, :func:`~hdserve.schema.rewritten`, with how its JSON texts are to be
    written, overriding what it says itself.

    Raises:
        ValueError: as for :func:`json_schema`, unless it is too deep.
        RecursionError: it is too deep.
    """
    return {OPTIONS: _JSON_OPTIONS, **rewritten(schema)}

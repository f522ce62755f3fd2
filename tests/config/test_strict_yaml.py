"""YAML is read as ever, but for keys that are there twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hdserve.config.strict_yaml import line_of, load_documents, load_yaml, read_yaml
from hdserve.errors import ConfigError

MERGED = "a: &base {b: 1, c: 2}\nd:\n  <<: *base\n  c: 3\n"


@pytest.mark.parametrize("text", [MERGED, "", "[1, {a: 1}, {a: 2}]", "1: a\n'1': b", "a: {b: 1}"])
def test_what_is_right_is_read_as_ever(text: str) -> None:
    """Anchors that are merged, too: overriding what comes from them is what they are for."""
    assert load_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["a: 1\na: 1", "x: {b: 1, b: 2}", "- {c: 1, 'c': 1}"])
def test_a_key_that_is_there_twice_is_named_with_its_place(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"the key '[abc]' is there twice(.|\n)*line"):
        load_yaml(text)


def test_documents_are_separate() -> None:
    assert load_documents("a: 1\n---\na: 2") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("text", ["[1, 2]: a", "? {a: 1}\n: b", "!!python/object:os.x {}", "a: ["])
def test_what_is_no_configuration_is_an_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a:\n\tb: 1", "line 2, column 1: while scanning for the next token found character '\\t'"),
        ("a:\n  - b: 1\n   c: 2", "line 3, column 4: while parsing a block collection expected"),
        ("a: b: c", "line 1, column 5: mapping values are not allowed here"),
        ("a: b\nc", "line 2, column 2: while scanning a simple key could not find expected ':'"),
        ("a: 'b", "line 1, column 6: while scanning a quoted scalar found unexpected end of"),
        ("a: [1, 2\nb: 3", "line 2, column 2: while parsing a flow sequence expected ',' or ']'"),
        ("a: 1\na: 2", "line 2, column 1: the key 'a' is there twice"),
        ("a: 1\n---\nb: 2", "line 2, column 1: expected a single document in the stream but found"),
        ("[1]: 2", "line 1, column 1: while constructing a mapping found unhashable key"),
        ("a: *b", "line 1, column 4: found undefined alias 'b'"),
        ("a: \0", "character 3 is not allowed in YAML"),
        ("a: 2024-13-01", "month must be in 1..12"),
        ("[" * 1000, "it is nested too deeply"),
        (b"a: 1\nb: \xff", "line 2 is not UTF-8 text"),
    ],
)
def test_a_fault_is_told_in_one_line(tmp_path: Path, content: str | bytes, reason: str) -> None:
    """The file, the place in it, and what is wrong."""
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert caught.value.message.startswith(f"cannot read the configuration {path}: {reason}")
    assert len(caught.value.message.splitlines()) == 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(tmp_path / "none.yaml")
    assert caught.value.message.endswith("none.yaml: No such file or directory")


def test_lines_of_values() -> None:
    """A value begins where its key or its item does; what is missing would be in what is there."""
    text = "a: 1\n\nb:\n  - x: 1\n    y: 2\n  - {x: 3,\n     y: 4}\n5: z\n"
    wanted: dict[tuple[int | str, ...], int | None] = {
        ("a",): 1,
        ("b",): 3,
        ("b", 0): 4,
        ("b", 0, "y"): 5,
        ("b", 1, "y"): 7,
        ("b", 1, "z"): 6,
        ("b", 2): 3,
        (5,): 8,
        ("c", "d"): None,
        (): None,
    }
    assert {location: line_of(text, location) for location in wanted} == wanted
    assert line_of("", ("a",)) is None

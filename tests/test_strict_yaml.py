"""YAML is read as ever, but for keys that are there twice."""

from __future__ import annotations

import pytest
import yaml

from hdserve.strict_yaml import load_documents, load_yaml

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

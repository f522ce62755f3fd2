"""YAML in which a duplicate key is an error; by default the last one wins silently."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from hdserve.errors import ConfigError


def load_yaml(text: str) -> Any:
    """Return the one document of ``text``.

    Raises:
        yaml.YAMLError: it is not YAML, or has a key twice.
    """
    return yaml.load(text, _Loader)


def load_documents(text: str) -> list[Any]:
    """Return all documents of ``text``.

    Raises:
        yaml.YAMLError: as :func:`load_yaml`.
    """
    return list(yaml.load_all(text, _Loader))


def read_text(path: str | Path) -> str:
    """Return what is in the file of a configuration.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        reason = f"line {line} is not UTF-8 text"
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error


def read_yaml(path: str | Path, load: Callable[[str], Any] = load_yaml) -> tuple[Any, str]:
    """Return what ``load`` makes of the file of a configuration, and its text: a pipe, for
    example, can be read only once.

    Raises:
        ConfigError: it cannot be read, or is not YAML; the message says in which line.
    """
    text = read_text(path)
    try:
        return parse_yaml(text, load), text
    except ValueError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error


def parse_yaml(text: str, load: Callable[[str], Any] = load_yaml) -> Any:
    """Return what ``load`` makes of ``text``.

    Raises:
        ValueError: it is not YAML; the message says in which line.
    """
    try:
        return load(text)
    except (yaml.YAMLError, ValueError) as error:  # such as a thirteenth month
        raise ValueError(describe_yaml_error(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def describe_yaml_error(error: Exception) -> str:
    """Return one line: the place, and what the parser says of it."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position} is not allowed in YAML"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    said = " ".join(filter(None, (error.context, error.problem)))
    return f"line {mark.line + 1}, column {mark.column + 1}: {said}"


def line_of(text: str, location: Sequence[int | str]) -> int | None:
    """Return the line, from 1 on, where the value at a location begins, or the innermost existing
    one around it; ``None`` if the text is empty.

    Args:
        text: valid YAML of one document.
        location: keys of mappings and indices of lists, from the outermost in.
    """
    node = yaml.compose(text, _Loader)
    line: int | None = None
    for part in location:
        found = None if node is None else _child(node, part)
        if found is None:
            break
        key, node = found
        line = key.start_mark.line + 1
    return line


def _child(node: yaml.Node, part: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    """Return the node that marks where a part of a node begins, and the part."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key, value
    return None


_MERGE_TAG = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:  # what is merged may be overridden
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in keys:
                reason = f"the key {str(key)[:100]!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, reason, key_node.start_mark)
            if isinstance(key, Hashable):
                keys.add(key)
        return super().construct_mapping(node, deep)

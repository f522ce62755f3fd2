"""YAML in which a key that is there twice is an error; by itself the last one wins silently."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """The one document of ``text``.

    Raises:
        yaml.YAMLError: it is no YAML, or has a key twice.
    """
    return yaml.load(text, _Loader)


def load_documents(text: str) -> list[Any]:
    """All documents of ``text``.

    Raises:
        yaml.YAMLError: as :func:`load_yaml`.
    """
    return list(yaml.load_all(text, _Loader))


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

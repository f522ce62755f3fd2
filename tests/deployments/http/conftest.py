"""What the tests of the page ask: a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import light_context


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """In light colours."""
    with light_context(tmp_path_factory.mktemp("profile")) as context:
        yield context

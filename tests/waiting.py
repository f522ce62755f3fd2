"""Waiting for what must come; how long it takes does not matter."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 60.0
"""What has not come by then never will."""


def eventually(
    is_true: Callable[[], bool], timeout_s: float = WAIT_S, pause_s: float = 0.01
) -> None:
    """Return when ``is_true`` does, which is asked again after ``pause_s``.

    Raises:
        AssertionError: it never did.
    """
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(pause_s)

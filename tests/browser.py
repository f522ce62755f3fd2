"""A headless Chromium for tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
TIMEOUT_MS = 60_000

_FLAGS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--no-sandbox",
)


@contextmanager
def browser_context(profile: Path, **options: Any) -> Iterator[Any]:
    """A browser with a profile of its own; ``options`` as ``launch_persistent_context`` takes
    them."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=_FLAGS, **options
        )
        try:
            yield context
        finally:
            context.close()


@contextmanager
def light_context(profile: Path) -> Iterator[Any]:
    """A browser in light colours whose waits end; without Chromium the test is skipped."""
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with browser_context(profile, color_scheme="light") as context:
        context.set_default_timeout(TIMEOUT_MS)
        yield context

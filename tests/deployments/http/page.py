"""The page as its tests use it."""

from __future__ import annotations

from typing import Any

QUESTION = "I want to book a table for two in San Jose."


def ask(page: Any, question: str = QUESTION, **settings: str) -> Any:
    """Send a message; the element of the answer that begins."""
    page.locator(".settings").evaluate("settings => { settings.open = true }")
    for name, value in settings.items():
        page.locator(f"#{name}").fill(value)
    page.get_by_label("Message").fill(question)
    page.get_by_role("button", name="Send").click()
    return page.locator(".answer").last


def wait_for_end(page: Any) -> None:
    """Until the answer is complete."""
    page.locator("#again:enabled").wait_for()

"""Take the screenshots of the documentation from a running server with the bundled models.

python -m tools.page_screenshots http://localhost:8000 docs/images
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.browser import browser_context

WIDE = {"width": 1180, "height": 760}
NARROW = {"width": 390, "height": 844}
QUESTION = "I want to book a table for two in San Jose."


def chat(page: Any) -> None:
    """Ask two questions, and show the draft of the step that accepted most."""
    for question in (QUESTION, "Can you find me one for four people?"):
        page.get_by_label("Message").fill(question)
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Regenerate").and_(page.locator(":enabled")).wait_for()
    steps = page.locator(".answer").first.locator(".step").all()
    max(steps, key=lambda step: int(step.get_attribute("data-accepted"))).hover()


def race(page: Any) -> None:
    """Have a prompt answered with and without drafts."""
    page.get_by_role("tab", name="Side by side").click()
    page.get_by_role("button", name="Race").click()
    page.get_by_text("The same text").wait_for()


def databases(page: Any) -> None:
    """Show the databases of the models."""
    page.get_by_role("tab", name="Databases").click()
    page.get_by_role("table").first.wait_for()
    page.wait_for_timeout(300)


def main(url: str, directory: Path) -> None:
    """Take the pictures of each view in each look."""
    directory.mkdir(parents=True, exist_ok=True)
    looks = {"light": ("light", WIDE), "dark": ("dark", WIDE), "narrow": ("light", NARROW)}
    with tempfile.TemporaryDirectory() as profile, browser_context(Path(profile)) as context:
        for look, (scheme, viewport) in looks.items():
            for view in (chat, race, databases):
                page = context.new_page()
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size(viewport)
                page.goto(url)
                page.locator("#model option").first.wait_for(state="attached")
                view(page)
                page.screenshot(path=directory / f"page-{view.__name__}-{look}.png")
                page.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

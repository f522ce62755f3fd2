"""The line that Claude Code writes into the text of the system for Anthropic alone.

It is another one in each request, so that with it at the top no prompt would begin as the one
before, and no two requests of a conversation would have the same session.
"""

from __future__ import annotations

from collections.abc import Iterable

BILLING = "x-anthropic-billing-header"

_BEGINNING = f"{BILLING}:"


def is_billed(texts: Iterable[str]) -> bool:
    """Return whether any of the texts begins with the line."""
    return any(text.startswith(_BEGINNING) for text in texts)


def without_billing(texts: Iterable[str]) -> list[str]:
    """Return the texts without the line, and without those that are nothing else."""
    found = []
    for text in texts:
        if not text.startswith(_BEGINNING):
            found.append(text)
        elif rest := text.partition("\n")[2]:
            found.append(rest)
    return found

"""Options that take several numbers."""

from __future__ import annotations

from hdserve.errors import ConfigError


def numbers(option: str, text: str) -> list[int]:
    """Return the comma-separated numbers in ``text``.

    Raises:
        ConfigError: one of them is not a number, or below 1; the message names ``option``.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{option} is a list of numbers from 1, as in 1,8,32")
    return found

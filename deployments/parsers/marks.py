"""Marks in a text that arrives in pieces: how much of its end may belong to one."""

from __future__ import annotations


def num_held(text: str, *tags: str) -> int:
    """Return the length of the end of ``text`` that may belong to one of ``tags``, including white
    space before it."""
    return len(text) - len(without_part(text, *tags).rstrip())


def without_part(text: str, *marks: str) -> str:
    """Return ``text`` without an ending that may be the beginning of one of ``marks``."""
    for number in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(text[-number:]) for mark in marks):
            return text[:-number]
    return text

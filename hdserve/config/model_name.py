"""The names that models can be served under."""

from __future__ import annotations


def name_fault(name: str) -> str:
    """Return why no model can be served under ``name``; empty if one can."""
    if not name:
        return "must not be empty"
    if name.isascii() and name.isprintable() and not set("#%").intersection(name):
        return ""
    return f"Ray Serve takes no model called {name!r}: ASCII without '#' and '%' is expected"

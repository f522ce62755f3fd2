"""What a client chose is safe to send back."""

from __future__ import annotations

from deployments.generation_route import _header_value


def test_header_values_are_harmless() -> None:
    """Names a client made up cannot break or forge a header."""
    found = _header_value(["ok", "a\r\nset-cookie: x", "é🙂", "\x7f\x00", "\ud800", "x" * 5000])
    assert found.startswith("ok, a\\r\\nset-cookie: x, ")
    assert found.isascii()
    assert found.isprintable()
    assert len(found) == 1000

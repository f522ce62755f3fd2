"""A tokenizer that needs no files."""

from __future__ import annotations

from collections.abc import Sequence


class Bytes:
    """A tokenizer whose tokens are bytes."""

    fingerprint = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

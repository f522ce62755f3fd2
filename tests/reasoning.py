"""A bundled model that knows the marks of reasoning as tokens."""

from __future__ import annotations

import json
from pathlib import Path

MARKS = ("<think>", "</think>")


def with_think_marks(directory: Path, *, is_special: bool = False) -> tuple[int, int]:
    """Give the tokenizer in ``directory`` a token for each mark, in place of two that it merges
    last; their ids."""
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    model = data["model"]
    token_ids = []
    for mark in MARKS:
        pair = model["merges"].pop()
        merged = pair.replace(" ", "") if isinstance(pair, str) else "".join(pair)
        token_id = model["vocab"].pop(merged)
        model["vocab"][mark] = token_id
        flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
        added = {"id": token_id, "content": mark, "special": is_special, **flags}
        data["added_tokens"].append(added)
        token_ids.append(token_id)
    path.write_text(json.dumps(data))
    opening, closing = token_ids
    return opening, closing

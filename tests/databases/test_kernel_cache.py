"""Compiled code is kept, and out of date as soon as any module of the compiled packages changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdserve.databases import ngram
from hdserve.databases.kernel_cache import KernelCache, sources_digest
from hdserve.drafting import growth, learning, recycling


def make_sources(root: Path, text: str) -> Path:
    for package in ("databases", "drafting"):
        (root / package).mkdir(parents=True)
        (root / package / "one.py").write_text("ONE = 1\n")
    (root / "drafting" / "two.py").write_text(text)
    return root


def test_any_change_changes_the_digest(tmp_path: Path) -> None:
    first = make_sources(tmp_path / "first", "TWO = 2\n")
    same = make_sources(tmp_path / "same", "TWO = 2\n")
    changed = make_sources(tmp_path / "changed", "TWO = 3\n")
    assert sources_digest(first) == sources_digest(same) != sources_digest(changed)


@pytest.mark.parametrize(
    "function", [ngram.insert_tokens, growth.grow_tree, learning.commit, recycling.recycle]
)
def test_entry_points_are_kept_under_the_digest(function: object) -> None:
    """What serves is loaded from a cache that knows about all modules."""
    cache = function._cache  # type: ignore[attr-defined]
    assert isinstance(cache, KernelCache)
    root = Path(ngram.__file__).parents[1]
    assert cache._impl.locator.get_source_stamp() == sources_digest(root)

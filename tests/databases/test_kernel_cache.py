"""Compiled code is kept, and out of date as soon as a module changes that is compiled with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdserve.databases import ngram
from hdserve.databases.kernel_cache import KernelCache, sources_digest
from hdserve.drafting import growth, learning, recycling
from hdserve.engine.kernels import attention


def make_sources(root: Path, text: str) -> Path:
    for folder in ("databases", "drafting", "kernels"):
        (root / folder).mkdir(parents=True)
        (root / folder / "one.py").write_text("ONE = 1\n")
    (root / "drafting" / "two.py").write_text(text)
    return root


def test_any_change_changes_the_digest(tmp_path: Path) -> None:
    """Of what is compiled together: databases and drafting are, other folders are by themselves."""
    first = make_sources(tmp_path / "first", "TWO = 2\n")
    same = make_sources(tmp_path / "same", "TWO = 2\n")
    changed = make_sources(tmp_path / "changed", "TWO = 3\n")
    for folder in ("databases", "drafting"):
        before, again, after = (sources_digest(root / folder) for root in (first, same, changed))
        assert before == again != after
    kernels = sources_digest(first / "kernels")
    assert kernels == sources_digest(changed / "kernels") != sources_digest(first / "drafting")


@pytest.mark.parametrize(
    "function",
    [ngram.insert_tokens, growth.grow_tree, learning.commit, recycling.recycle, attention.attend],
)
def test_entry_points_are_kept_under_the_digest(function: Any) -> None:
    """What serves is loaded from a cache that knows about all modules."""
    cache = function._cache
    assert isinstance(cache, KernelCache)
    folder = Path(function.py_func.__code__.co_filename).parent
    assert cache._impl.locator.get_source_stamp() == sources_digest(folder)

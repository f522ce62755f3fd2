"""A few cases of every target, and all that ever was a finding; ``make fuzz`` runs the many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.errors import HdserveError
from tests.fuzz import targets
from tests.fuzz.targets import TARGETS, seeds

NEVER_REFUSED = {"tool_calls", "trees"}
FINDINGS = sorted((Path(__file__).parent / "findings").glob("*/*"))


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """Bytes that are right, but for a piece that is something else; or anything."""
    known = seeds(name)
    if draw(st.booleans()):
        return draw(st.binary(max_size=300))
    data = draw(st.sampled_from(known))
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(len(data), start + 40)))
    return data[:start] + draw(st.binary(max_size=20)) + data[stop:]


@pytest.mark.parametrize("name", TARGETS)
def test_cases(name: str) -> None:
    @settings(max_examples=150)
    @given(data=damaged(name))
    def search(data: bytes) -> None:
        TARGETS[name](data)

    search()


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several read an input, each takes one, and one takes each."""
    are_taken: list[list[bool]] = []

    @contextmanager
    def refused(_max_characters: int = 0) -> Iterator[None]:
        are_taken[-1].append(False)
        with suppress(HdserveError):
            yield
            are_taken[-1][-1] = True

    monkeypatch.setattr(targets, "refused", refused)
    for seed in seeds(name):
        are_taken.append([])
        TARGETS[name](seed)
    readers = [*zip(*are_taken, strict=True)]
    assert bool(readers) is (name not in NEVER_REFUSED)
    if readers:
        assert all(map(any, are_taken)), are_taken
        assert all(map(any, readers)), are_taken


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_findings_stay_mended(path: Path) -> None:
    """``findings/TARGET/NAME`` is an input that once was answered wrongly."""
    TARGETS[path.parent.name](path.read_bytes())

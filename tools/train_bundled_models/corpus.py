"""The training text: which documents are read, and how much of each source.

A corpus file holds one JSON object a line (``.jsonl``, or gzipped ``.jsonl.gz``) with the fields
``kind``, ``source``, ``licence``, ``split`` (``train`` or ``valid``) and either ``text`` or, for a
conversation, ``messages``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from tools.train_bundled_models.chat import render_chat

Split = Literal["train", "valid"]

EXCLUDED_SOURCES = ("GPTeacher",)
"""Left out unless asked for: the text of a commercial model."""

SOURCE_LIMITS_BYTES: Mapping[str, int] = {
    "SGD (dstc8-schema-guided-dialogue)": 12_000_000,
    "Python PEPs": 2_500_000,
    "kubernetes/enhancements": 2_000_000,
    "rust-lang/rfcs": 2_000_000,
    "swift-evolution": 1_000_000,
    "classic-books-markdown": 8_000_000,
    "Python standard library": 8_000_000,
}
"""Training text taken from the sources that would otherwise crowd out the others."""

_SKIPPED_LIBRARY_PARTS = frozenset(
    {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "turtledemo"}
    | {"encodings", "idle_test", "_bundled"}
)


@dataclass(frozen=True, slots=True)
class Document:
    """One piece of text; ``kind`` decides how often it is drawn for training."""

    kind: str
    source: str
    licence: str
    split: Split
    text: str


def read_documents(
    corpus: Path,
    excluded_sources: Iterable[str] = EXCLUDED_SOURCES,
    with_standard_library: bool = True,
) -> Iterator[Document]:
    """Yield documents to train on and to evaluate on, in a fixed order.

    Args:
        corpus: the corpus file.
        excluded_sources: beginnings of the names of sources to leave out, from both splits.
        with_standard_library: add the Python source of the running interpreter as kind ``code``.
    """
    excluded = tuple(excluded_sources)
    taken: Counter[str] = Counter()
    rows = _corpus_documents(corpus)
    code = standard_library_documents() if with_standard_library else iter(())
    for documents in (rows, code):
        for document in documents:
            if excluded and document.source.startswith(excluded):
                continue
            if document.split == "train":
                limit = SOURCE_LIMITS_BYTES.get(document.source)
                if limit is not None and taken[document.source] >= limit:
                    continue
                taken[document.source] += len(document.text.encode())
            yield document


def standard_library_documents() -> Iterator[Document]:
    """Yield modules of the interpreter's standard library, in an order that mixes packages.

    About one file in a hundred is held out, chosen by the hash of its name.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = (
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _SKIPPED_LIBRARY_PARTS.intersection(path.relative_to(root).parts)
    )
    for digest, name in sorted((hashlib.sha256(name.encode()).digest(), name) for name in names):
        yield Document(
            kind="code",
            source="Python standard library",
            licence="PSF-2.0",
            split="valid" if digest[0] < 3 else "train",
            text=(root / name).read_text(encoding="utf-8", errors="replace"),
        )


def _corpus_documents(corpus: Path) -> Iterator[Document]:
    with _open_text(corpus) as lines:
        for line in lines:
            row: dict[str, Any] = json.loads(line)
            yield Document(
                kind=row["kind"],
                source=row["source"],
                licence=row["licence"],
                split=row["split"],
                text=render_chat(row["messages"]) if "messages" in row else row["text"],
            )


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")

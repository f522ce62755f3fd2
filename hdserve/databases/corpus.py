"""Reading corpora: text, JSONL of ``text`` or ``messages``, and replay files, perhaps gzipped.

A corpus is read as a stream of *segments*, the pieces whose n-grams are counted: a text, one
message of a chat, the answer to it (``text`` beside ``messages``, as ``hdserve generate`` writes
it), or the prompt and the response of a recorded request.  A row may name its ``source`` and
``licence``.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hdserve.databases.ngram import MAX_TOKEN_ID
from hdserve.errors import DatabaseError

TEXT_SUFFIXES = (".txt", ".md")
ROW_SUFFIXES = (".jsonl", ".ndjson")
TEXT_PIECE_CHARS = 1 << 16
"""A plain text file is cut at the first line end after this many characters."""

_WANTED = "a row needs `text`, `messages`, or `prompt` and `response`"

LONGEST_PIECE = 1 << 20
"""Lines of a text file with more bytes, and texts with more characters or tokens, are cut."""


@dataclass(frozen=True, slots=True)
class CorpusSegment:
    """A piece of a corpus.

    Attributes:
        content: text to be tokenised, or token ids.
        is_turn: whether a chat model ends it with its end-of-turn token.
        position: bytes of the file, as stored on disk, that were read so far.
        source: where the row says it was taken from; empty if it does not say.
        licence: the licence the row states.
    """

    content: str | list[int]
    is_turn: bool
    position: int
    source: str = ""
    licence: str = ""


def corpus_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that ``inputs`` name: files, directories (searched below) and glob patterns.

    Raises:
        DatabaseError: an input matches nothing, cannot be accessed, or is JSON that is not JSONL.
    """
    files: dict[Path, None] = {}
    for name in inputs:
        try:
            found = _files_of(name)
            for path in found:
                path.stat()  # a pattern also matches links to nothing
        except OSError as error:
            place = error.filename or name
            raise DatabaseError(f"{place}: cannot be read: {error.strerror}") from error
        if not found:
            raise DatabaseError(f"{name}: no such file, and no pattern or directory of corpora")
        _check_forms(found)
        files |= dict.fromkeys(found)
    return list(files)


def _files_of(name: str | Path) -> list[Path]:
    """
    Raises:
        OSError: it cannot be accessed.
    """
    path = Path(name)
    if path.is_dir():
        return sorted(file for file in _files_below(path) if _is_corpus(file) and file.is_file())
    if path.exists():
        return [path]
    return [Path(match) for match in sorted(glob.glob(str(name), recursive=True))]


def _check_forms(paths: Iterable[Path]) -> None:
    """
    Raises:
        DatabaseError: one is JSON, whose marks and escapes would be counted as text.
    """
    for path in paths:
        if _kind(path).endswith(".json"):
            raise DatabaseError(
                f"{path}: of JSON only JSON Lines are read, from files called .jsonl; "
                "`jq -c '.[]'` makes them of a list of rows"
            )


def _files_below(directory: Path) -> Iterator[Path]:
    """
    Raises:
        OSError: it, or a directory in it, cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    for place, _, names in os.walk(directory, onerror=refuse):
        yield from (Path(place, name) for name in names)


def _is_corpus(path: Path) -> bool:
    return _kind(path).endswith(TEXT_SUFFIXES + ROW_SUFFIXES)


def _kind(path: Path) -> str:
    """The name that says what a file holds once it is unpacked."""
    return path.name.lower().removesuffix(".gz")


def read_segments(path: str | Path) -> Iterator[CorpusSegment]:
    """The segments of a file, in order.

    ``.jsonl`` and ``.jsonl.gz`` hold one JSON object per line; anything else is text.

    Raises:
        DatabaseError: the file cannot be read, or a line is not of a known form.
    """
    path = Path(path)
    is_zipped = path.suffix.lower() == ".gz"
    is_jsonl = _kind(path).endswith(ROW_SUFFIXES)
    try:
        with path.open("rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if is_zipped else raw
            yield from _read_rows(file, raw, path) if is_jsonl else _read_text(file, raw)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DatabaseError(f"{path}: cannot be read: {error}") from error


def _read_text(file: IO[bytes] | gzip.GzipFile, raw: IO[bytes]) -> Iterator[CorpusSegment]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines: list[str] = []
    num_chars = 0
    while line := file.readline(LONGEST_PIECE):
        lines.append(decoder.decode(line))
        num_chars += len(lines[-1])
        if num_chars >= TEXT_PIECE_CHARS:
            yield CorpusSegment("".join(lines), False, raw.tell())
            lines, num_chars = [], 0
    decoder.decode(b"", final=True)
    if lines:
        yield CorpusSegment("".join(lines), False, raw.tell())


def _read_rows(
    file: IO[bytes] | gzip.GzipFile, raw: IO[bytes], path: Path
) -> Iterator[CorpusSegment]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            segments = list(_segments_of(row, raw.tell()))
        except (ValueError, RecursionError) as error:
            raise DatabaseError(f"{path}, line {number}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise DatabaseError(f"{path}, line {number}: {_WANTED}") from error
        yield from segments


def _segments_of(row: dict[str, Any], position: int) -> Iterator[CorpusSegment]:
    source, licence = (_whole(str(row.get(name) or "")) for name in ("source", "licence"))
    for found, is_turn in _contents_of(row):
        content = _whole(found) if isinstance(found, str) else found
        end = max(len(content), 1)
        for begin in range(0, end, LONGEST_PIECE):
            piece = content[begin : begin + LONGEST_PIECE]
            is_end = begin + LONGEST_PIECE >= end
            yield CorpusSegment(piece, is_turn and is_end, position, source, licence)


def _contents_of(row: dict[str, Any]) -> Iterator[tuple[str | list[int], bool]]:
    """Texts or token ids, each with whether it is a turn of the assistant."""
    if row.get("messages"):
        for message in row["messages"]:
            if text := _text_of(message.get("content")):
                yield text, message.get("role") == "assistant"
        yield from _answer_in(row)
    elif "response" in row:
        for key in ("prompt", "response"):
            tokens = row[key]
            if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in tokens):
                raise ValueError(f"{key} is not a list of token ids")
            yield tokens, False
    elif isinstance(row.get("text"), str):
        yield row["text"], False
    elif row.get("messages") != []:
        raise ValueError(_WANTED)


def _answer_in(row: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """The ``text`` of a row whose messages end with a question; where they end with an answer, it
    would be the same once more.  A cut answer ends no turn."""
    text = row.get("text")
    is_asked = row["messages"][-1].get("role") != "assistant"
    if is_asked and isinstance(text, str) and text:
        yield text, row.get("finish_reason", "stop") == "stop"


def _whole(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, which JSON can express and no encoding can."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text_of(content: Any) -> str:
    """The text of a message's content: a string, a list of text parts, or nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or any(part.get("type") != "text" for part in content):
        raise ValueError("the content of a message is neither text nor a list of texts")
    return "".join(part["text"] for part in content)

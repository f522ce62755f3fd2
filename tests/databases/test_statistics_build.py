"""Building statistics from files: every form of corpus, interrupted and resumed."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hdserve.databases.corpus import LONGEST_PIECE, corpus_files, read_segments
from hdserve.databases.ngram import MAX_TOKEN_ID, most_frequent
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_build import BATCH_LENGTH, StatisticsBuild
from hdserve.databases.statistics_info import (
    CHECKPOINT_NAME,
    INFO_NAME,
    MAX_CORPORA,
    MAX_LICENCES,
    OTHERS,
    TABLE_NAME,
    is_unfinished,
)
from hdserve.errors import DatabaseError
from tests.closed import closed, open_directory
from tests.databases.byte_tokens import Bytes


class Interrupted(Exception):
    """Stands for a killed process."""


def _write_rows(path: Path, rows: list[object]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def _run(directory: Path, *paths: Path, **options: object) -> StatisticsDatabase:
    options = {"max_bytes": 1 << 22, "turn_end": (256,), **options}
    StatisticsBuild(directory, paths, Bytes(), 300, **options).run()  # type: ignore[arg-type]
    return StatisticsDatabase.open(directory)


def _next(database: StatisticsDatabase, context: str) -> list[int]:
    found = most_frequent(database.rows, database.size, list(context.encode()), 5)
    return [token for token, _ in found]


def test_every_form_of_corpus(tmp_path: Path) -> None:
    """Text, rows of text, chats and recorded requests in one database."""
    text = tmp_path / "plain.txt"
    text.write_text("abc\n")
    rows = _write_rows(tmp_path / "rows.jsonl", [{"text": "dex"}])
    messages = [{"role": "user", "content": "uv"}, {"role": "assistant", "content": "xyz"}]
    chat = _write_rows(tmp_path / "chat.jsonl.gz", [{"messages": messages}])
    recorded = _write_rows(tmp_path / "r.jsonl", [{"prompt": [70, 71], "response": [72, 73]}])
    database = _run(tmp_path / "s", text, rows, chat, recorded)
    assert _next(database, "ab") == [ord("c")]
    assert _next(database, "de") == [ord("x")]
    assert _next(database, "yz") == [256], "an assistant's message ends its turn"
    assert _next(database, "uv") == []
    assert _next(database, "F") == [71]
    assert {c.name: c.num_tokens for c in database.info.corpora} == {
        "plain.txt": 4,
        "rows.jsonl": 3,
        "chat.jsonl.gz": 6,
        "r.jsonl": 4,
    }


def test_interrupted_build_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    """Killed after a checkpoint and run again, the result is the same, byte for byte."""
    rows = [{"text": f"{number} {number * number} {number**3}"} for number in range(2000)]
    corpus = _write_rows(tmp_path / "rows.jsonl", rows)
    whole = _run(tmp_path / "whole", corpus)
    directory = tmp_path / "parts"
    calls = []

    def interrupt(path: Path, position: int, num_tokens: int) -> None:
        calls.append(position)
        if len(calls) == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        _run(directory, corpus, on_progress=interrupt, checkpoint_tokens=5000)
    assert not (directory / INFO_NAME).exists()
    build = StatisticsBuild(directory, (corpus,), Bytes(), 300, turn_end=(256,), max_bytes=1 << 22)
    assert build.num_resumed > 0
    info = build.run()
    assert info == whole.info
    assert (directory / TABLE_NAME).read_bytes() == (tmp_path / "whole" / TABLE_NAME).read_bytes()
    assert not (directory / CHECKPOINT_NAME).exists()


def test_a_build_that_was_interrupted_at_its_end_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the state to go on from was being removed, whatever file of it is removed first."""
    corpus = _write_rows(tmp_path / "rows.jsonl", [{"text": "a" * 50}] * 1000)
    target, remove = tmp_path / "s", shutil.rmtree

    def interrupt(directory: Path, *, ignore_errors: bool) -> None:
        if (target / INFO_NAME).exists() and directory.exists():
            (directory / TABLE_NAME).unlink()
            raise Interrupted
        remove(directory, ignore_errors=ignore_errors)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(Interrupted):
            _run(target, corpus, checkpoint_tokens=5000)
    assert (target / CHECKPOINT_NAME).exists()
    assert _run(target, corpus, checkpoint_tokens=5000).info.num_tokens == 50_000
    assert not [path for path in target.iterdir() if is_unfinished(path.relative_to(target))]


def test_a_name_that_is_no_text_ends_no_build(tmp_path: Path) -> None:
    """Names may have any bytes, as of files that another system packed."""
    corpus = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    _write_rows(corpus, [{"text": "a" * 50}] * 1000)
    _interrupted(tmp_path / "s", corpus)
    assert _run(tmp_path / "s", corpus).info.num_tokens == 50_000


def _interrupted(directory: Path, *paths: Path, **options: object) -> None:
    """A build that was killed after a checkpoint."""

    def interrupt(path: Path, position: int, num_tokens: int) -> None:
        if num_tokens > 30_000:
            raise Interrupted

    with pytest.raises(Interrupted):
        _run(directory, *paths, on_progress=interrupt, checkpoint_tokens=5000, **options)


def test_unfinished_build_does_not_go_on_in_another_order(tmp_path: Path) -> None:
    """What it has read are the first texts of the first files."""
    rows = [{"text": "a" * 50}] * 1000
    paths = [_write_rows(tmp_path / name, rows) for name in ("a.jsonl", "b.jsonl")]
    _interrupted(tmp_path / "s", *paths)
    with pytest.raises(DatabaseError, match="unfinished build of other inputs or settings"):
        _run(tmp_path / "s", *reversed(paths))
    _run(tmp_path / "s", *paths)


def test_unfinished_build_of_other_files_is_not_mixed(tmp_path: Path) -> None:
    corpus = _write_rows(tmp_path / "rows.jsonl", [{"text": "a" * 50}] * 1000)
    other = _write_rows(tmp_path / "other.jsonl", [{"text": "b"}])
    _interrupted(tmp_path / "s", corpus)
    with pytest.raises(DatabaseError, match="unfinished build of other inputs or settings"):
        _run(tmp_path / "s", other)
    with pytest.raises(DatabaseError, match="other settings"):
        StatisticsBuild(tmp_path / "s", (corpus,), Bytes(), 301, turn_end=(256,), max_bytes=1 << 22)
    (tmp_path / "s" / CHECKPOINT_NAME / TABLE_NAME).write_bytes(b"")
    with pytest.raises(DatabaseError, match="cannot be resumed"):
        _run(tmp_path / "s", corpus)


@pytest.mark.parametrize(
    "others", [{"turn_end": (257,)}, {"max_bytes": 1 << 23}, {"excluded_sources": ("x",)}]
)
def test_unfinished_build_with_other_settings_is_not_mixed(
    tmp_path: Path, others: dict[str, object]
) -> None:
    corpus = _write_rows(tmp_path / "rows.jsonl", [_sourced("y", "a" * 50)] * 1000)
    _interrupted(tmp_path / "s", corpus)
    with pytest.raises(DatabaseError, match="unfinished build of other inputs or settings"):
        _run(tmp_path / "s", corpus, **others)


def test_unfinished_build_of_a_rewritten_file_is_not_mixed(tmp_path: Path) -> None:
    """Of the same name and size."""
    corpus = _write_rows(tmp_path / "rows.jsonl", [{"text": "a" * 50}] * 1000)
    _interrupted(tmp_path / "s", corpus)
    _write_rows(corpus, [{"text": "b" * 50}] * 1000)
    with pytest.raises(DatabaseError, match="unfinished build of other inputs or settings"):
        _run(tmp_path / "s", corpus)
    _write_rows(corpus, [{"text": "a" * 50}] * 1000)
    _run(tmp_path / "s", corpus)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        "{}",
        '{"text": 3}',
        '{"messages": 3}',
        '{"messages": null}',
        '{"messages": [{"content": 3}]}',
        '{"messages": [{"content": {"text": "a"}}]}',
        '{"messages": [{"content": ["a"]}]}',
        '{"messages": [{"content": [{"type": "text", "text": 3}]}]}',
        '{"messages": [{"content": [{"type": "text"}]}]}',
        '{"messages": [{"content": [{"type": "image_url", "image_url": {}}]}]}',
        '{"prompt": [1], "response": ["a"]}',
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DatabaseError, match="line 2"):
        list(read_segments(path))


def test_parts_of_a_message_are_one_text(tmp_path: Path) -> None:
    """As clients of the chat API send them; what has no text is left out."""
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": []},
        {"role": "assistant", "content": parts[:1]},
    ]
    path = _write_rows(tmp_path / "chat.jsonl", [{"messages": messages}])
    found = [(segment.content, segment.is_turn) for segment in read_segments(path)]
    assert found == [("abcd", False), ("ab", True)]


def test_an_answer_beside_the_messages_is_a_turn(tmp_path: Path) -> None:
    """As `hdserve generate` writes it; one that was cut ends no turn, and the text of a chat that
    has its answer is not counted once more."""
    asked = [{"role": "user", "content": "uv"}]
    answered = [*asked, {"role": "assistant", "content": "xyz"}]
    rows: list[object] = [
        {"prompt": "uv", "messages": asked, "text": "xyz", "finish_reason": "stop"},
        {"messages": asked, "text": "xyz"},
        {"messages": asked, "text": "xy", "finish_reason": "length"},
        {"messages": answered, "text": "uvxyz"},
        {"messages": asked, "text": ""},
    ]
    path = _write_rows(tmp_path / "answers.jsonl", rows)
    found = [(segment.content, segment.is_turn) for segment in read_segments(path)]
    question = ("uv", False)
    assert found == [
        *(question, ("xyz", True)),
        *(question, ("xyz", True)),
        *(question, ("xy", False)),
        *(question, ("xyz", True)),
        question,
    ]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="cannot be read"):
        _run(tmp_path / "s", tmp_path / "nothing.txt")
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(b"\x1f\x8bjunk")
    with pytest.raises(DatabaseError, match="cannot be read"):
        list(read_segments(broken))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("\xe9".encode("latin-1"))
    with pytest.raises(DatabaseError, match="cannot be read"):
        list(read_segments(latin))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """At once, by its name, as an unfinished build reads its inputs again."""
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    reading, writing = os.pipe()
    with contextlib.closing(os.fdopen(writing, "w")):
        for path in (pipe, Path(f"/dev/fd/{reading}"), Path("/dev/null")):
            with pytest.raises(DatabaseError, match=f"{path}: is no file: pipes and devices"):
                _run(tmp_path / "s", path)
    os.close(reading)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    """Nor of rows."""
    text, rows = tmp_path / "own.txt", tmp_path / "own.jsonl"
    text.write_text("abc\n", encoding="utf-8-sig")
    rows.write_text('{"text": "abc\\n"}\n', encoding="utf-8-sig")
    for path in (text, rows):
        (segment,) = read_segments(path)
        assert segment.content == "abc\n"
        assert segment.position == path.stat().st_size


def test_long_text_is_cut_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("0123456789\n" * 20_000)
    segments = list(read_segments(path))
    assert len(segments) > 2
    assert all(str(segment.content).endswith("\n") for segment in segments)
    assert segments[-1].position == 220_000


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_text_without_line_ends_is_read_in_pieces(tmp_path: Path, suffix: str) -> None:
    """Also where a piece would end within a character, and however well it was compressed."""
    text = "\u00e9\u4e2d" * LONGEST_PIECE
    path = tmp_path / f"line.{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    pieces = [segment.content for segment in read_segments(path)]
    assert max(map(len, pieces)) <= LONGEST_PIECE
    assert "".join(map(str, pieces)) == text
    (tmp_path / "half.txt").write_bytes(text.encode()[:-1])
    with pytest.raises(DatabaseError, match="cannot be read"):
        list(read_segments(tmp_path / "half.txt"))


def test_long_documents_are_counted_in_pieces(tmp_path: Path) -> None:
    """So that neither a document nor many in one batch take more memory than a few others."""
    long, tokens = "ab " * LONGEST_PIECE, [5, 6] * LONGEST_PIECE
    messages = [{"role": "assistant", "content": long}]
    rows = [{"messages": messages}, {"prompt": [1], "response": tokens}, *[{"text": long}] * 3]
    path = _write_rows(tmp_path / "rows.jsonl", list(rows))
    segments = list(read_segments(path))
    assert max(len(segment.content) for segment in segments) <= LONGEST_PIECE
    assert [segment.is_turn for segment in segments] == [False] * 2 + [True] + [False] * 12
    sizes = []

    class Counting(Bytes):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            sizes.append(sum(map(len, texts)))
            return [[7]] * len(texts)

    StatisticsBuild(tmp_path / "s", (path,), Counting(), 300, max_bytes=1 << 20).run()
    assert sum(sizes) == 4 * len(long)
    assert max(sizes) < BATCH_LENGTH + LONGEST_PIECE


@contextmanager
def _full_disk(max_bytes: int) -> Iterator[None]:
    """No file grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("max_bytes", [100, 5000])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, max_bytes: int) -> None:
    """And nothing else; the build is right when there is room again."""
    few = _write_rows(tmp_path / "few.jsonl", [{"text": "abc"}])
    many = _write_rows(tmp_path / "many.jsonl", [{"text": f"{n} {n * n}"} for n in range(500)])
    whole = _run(tmp_path / "whole", many)
    _run(tmp_path / "s", few)
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    with _full_disk(max_bytes), pytest.raises(DatabaseError, match="cannot be written"):
        _run(tmp_path / "s", many)
    assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before
    info = _run(tmp_path / "s", many).info
    assert info.model_copy(update={"table": TABLE_NAME}) == whole.info


def test_a_database_is_there_until_all_of_the_next_one_is_written(tmp_path: Path) -> None:
    few, more = ([{"text": "abc"}] * number for number in (1, 2))
    before = _run(tmp_path / "s", _write_rows(tmp_path / "few.jsonl", list(few)))
    (tmp_path / "s" / f"{INFO_NAME}.partial").mkdir()
    with pytest.raises(DatabaseError, match="cannot be written"):
        _run(tmp_path / "s", _write_rows(tmp_path / "more.jsonl", list(more)))
    assert StatisticsDatabase.open(tmp_path / "s").info == before.info


def test_a_place_that_cannot_be_written_is_found_before_anything_is_counted(
    tmp_path: Path,
) -> None:
    corpus = _write_rows(tmp_path / "rows.jsonl", [{"text": "abc"}])
    counted: list[int] = []
    with pytest.raises(DatabaseError, match="cannot be written"):
        _run(corpus / "s", corpus, on_progress=lambda *told: counted.append(told[2]))
    assert counted == []


def test_inputs_without_text_leave_nothing(tmp_path: Path) -> None:
    """Neither a directory nor those it is in; what was there before stays, empty or not."""
    corpus = _write_rows(tmp_path / "rows.jsonl", [{"text": ""}])
    (tmp_path / "empty").mkdir()
    few = _write_rows(tmp_path / "few.jsonl", [{"text": "abc"}])
    database = _run(tmp_path / "s", few)
    for directory in (tmp_path / "new" / "s", tmp_path / "empty", tmp_path / "s"):
        with pytest.raises(DatabaseError, match="no text was counted"):
            _run(directory, corpus)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"rows.jsonl", "few.jsonl", "empty", "s"}
    assert StatisticsDatabase.open(tmp_path / "s").info == database.info


def _sourced(source: str, text: str, licence: str = "MIT") -> dict[str, str]:
    return {"source": source, "licence": licence, "text": text}


def test_rows_that_name_no_source_are_listed_under_their_file(tmp_path: Path) -> None:
    """Also where a column of nothing says so."""
    rows = [{"text": "abc"}, {"text": "abd", "source": None, "licence": None}]
    (corpus,) = _run(tmp_path / "s", _write_rows(tmp_path / "rows.jsonl", rows)).info.corpora
    assert (corpus.name, corpus.num_texts, corpus.licences) == ("rows.jsonl", 2, ())


def test_sources_are_listed_with_licences_and_can_be_left_out(tmp_path: Path) -> None:
    rows = [
        _sourced("Books", "abc"),
        _sourced("Made by a model, first", "xyz"),
        _sourced("Books", "abd", "CC0-1.0"),
        {"text": "ef"},
    ]
    corpus = _write_rows(tmp_path / "rows.jsonl", list(rows))
    database = _run(tmp_path / "s", corpus, excluded_sources=("Made by a model",))
    assert [(c.name, c.num_texts, c.licences) for c in database.info.corpora] == [
        ("Books", 2, ("MIT", "CC0-1.0")),
        ("rows.jsonl", 1, ()),
    ]
    assert _next(database, "xy") == []
    build = StatisticsBuild(tmp_path / "t", (corpus,), Bytes(), 300, excluded_sources=("Made",))
    build.run()
    assert build.num_excluded == {"Made by a model, first": 1}


def test_inputs_are_files_directories_and_patterns(tmp_path: Path) -> None:
    for name in ("a/one.TXT", "a/b/two.JSONL.GZ", "a/picture.png", "three.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = corpus_files([tmp_path / "a", str(tmp_path / "*.md"), tmp_path / "a/one.TXT"])
    names = [path.relative_to(tmp_path).as_posix() for path in found]
    assert names == ["a/b/two.JSONL.GZ", "a/one.TXT", "three.md"]
    assert corpus_files([tmp_path / "a/picture.png"]) == [tmp_path / "a/picture.png"]
    with pytest.raises(DatabaseError, match="no such file"):
        corpus_files([tmp_path / "*.csv"])


@pytest.mark.parametrize("name", ["link.txt", "*.txt"])
def test_a_link_to_nothing_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "link.txt").symlink_to("nothing")
    with pytest.raises(DatabaseError, match=r"link\.txt: cannot be read: No such file"):
        corpus_files([tmp_path / name])


@pytest.mark.parametrize("name", ["ROWS.JSONL", "ROWS.JSONL.GZ", "rows.jsonl.gz"])
def test_capital_letters_name_the_same_kind(tmp_path: Path, name: str) -> None:
    data = b'{"text": "abc"}\n'
    (tmp_path / name).write_bytes(gzip.compress(data) if name.lower().endswith("gz") else data)
    assert [segment.content for segment in read_segments(tmp_path / name)] == ["abc"]


@pytest.mark.parametrize("messages", [None, []])
def test_a_row_without_messages_has_its_text(tmp_path: Path, messages: list[object] | None) -> None:
    """Tables fill what a row lacks."""
    rows = [{"messages": []}, {"messages": messages, "text": "abc"}]
    path = _write_rows(tmp_path / "rows.jsonl", rows)
    assert [segment.content for segment in read_segments(path)] == ["abc"]


@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz", "ROWS.JSON"])
def test_json_that_is_no_json_lines_is_refused(tmp_path: Path, name: str) -> None:
    """It would be counted with its marks and escapes; in a directory, there may be any files."""
    (tmp_path / name).write_bytes(b"[]")
    (tmp_path / "text.txt").write_text("a")
    for given in (str(tmp_path / name), str(tmp_path / "*")):
        with pytest.raises(DatabaseError, match=r"called \.jsonl; `jq -c '\.\[\]'` makes"):
            corpus_files([given])
    assert corpus_files([tmp_path]) == [tmp_path / "text.txt"]


def test_a_closed_directory_is_not_left_out() -> None:
    """The rest would pass for the whole corpus; and it is there."""
    with open_directory() as corpora:
        inside = corpora / "b"
        inside.mkdir()
        (corpora / "one.txt").touch()
        (inside / "two.txt").touch()
        for given, place in ((corpora, inside), (inside, inside), (corpora, corpora)):
            told = f"^{place}: cannot be read: Permission denied"
            with closed(place), pytest.raises(DatabaseError, match=told):
                corpus_files([given])
        assert corpus_files([corpora]) == [inside / "two.txt", corpora / "one.txt"]


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "txt.gz", "jsonl.gz"])
def test_progress_ends_at_the_size_of_the_file(tmp_path: Path, suffix: str) -> None:
    """In bytes on the disk, so that a bar has a total for compressed files, too."""
    path = tmp_path / f"text.{suffix}"
    data = b"".join(b'{"text": "line %d of it"}\n' % number for number in range(20_000))
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    positions = [segment.position for segment in read_segments(path)]
    assert positions == sorted(positions)
    assert positions[0] < positions[-1] or len(positions) < 3
    assert 0.9 * path.stat().st_size < positions[-1] <= path.stat().st_size


def test_halves_of_surrogate_pairs_are_read_as_unknown_characters(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"text": "a\\ud800b \\ud83d\\ude00", "source": "s\\udc00", "licence": "\\ud800"}\n'
        b'{"messages": [{"role": "user", "content": "\\ufeffx\\ud83d"}]}\n'
    )
    first, second = read_segments(path)
    assert (first.content, first.source, first.licence) == (
        "a\ufffdb \U0001f600",
        "s\ufffd",
        "\ufffd",
    )
    assert second.content == "\ufeffx\ufffd"
    assert [corpus.name for corpus in _run(tmp_path / "s", path).info.corpora] == [
        "s\ufffd",
        "rows.jsonl",
    ]


@pytest.mark.parametrize("token_id", [-1, MAX_TOKEN_ID + 1, 10**30])
def test_ids_that_no_tokenizer_has_are_refused_with_their_line(
    tmp_path: Path, token_id: int
) -> None:
    rows = [{"prompt": [1], "response": [2]}, {"prompt": [1], "response": [token_id]}]
    path = _write_rows(tmp_path / "rows.jsonl", list(rows))
    with pytest.raises(DatabaseError, match=r"rows.jsonl, line 2: .*response"):
        _run(tmp_path / "s", path)


def test_a_source_of_each_text_makes_no_large_description(tmp_path: Path) -> None:
    """Those beyond a thousand are listed together, with their texts and tokens."""
    rows = [_sourced(f"{n} " + "x" * 5000, "abc", f"{n} " + "y" * 500) for n in range(3000)]
    info = _run(tmp_path / "s", _write_rows(tmp_path / "rows.jsonl", list(rows))).info
    assert (tmp_path / "s" / INFO_NAME).stat().st_size < 2**20
    assert len(info.corpora) == MAX_CORPORA + 1
    others = info.corpora[-1]
    assert (others.name, others.num_texts, len(others.licences)) == (OTHERS, 2000, MAX_LICENCES)
    assert info.num_tokens == 9000

"""Merging statistics databases: all counts are there, also after an interruption."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hdserve.cli.commands import app
from hdserve.databases.ngram import most_frequent
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_checkpoint import PROGRESS_NAME, Checkpoint
from hdserve.databases.statistics_info import CHECKPOINT_NAME, INFO_NAME, TABLE_NAME
from hdserve.databases.statistics_merge import MergeProgress, StatisticsMerge
from hdserve.errors import DatabaseError, SnapshotError
from tests.interruption import interrupt_when, interrupted_at

TEXT = [5, 6, 7, 5, 6, 8, 5, 6, 7]


def _build(directory: Path, text: list[int], tokenizer: str = "t") -> Path:
    builder = StatisticsBuilder(tokenizer, 100, max_bytes=1 << 20)
    builder.add("corpus", text)
    builder.write(directory)
    return directory


def _sources(directory: Path, num: int) -> list[Path]:
    rng = np.random.default_rng(5)
    texts = rng.integers(0, 30, (num, 400)).tolist()
    return [_build(directory / f"{number}", text) for number, text in enumerate(texts)]


def _content(directory: Path) -> tuple[bytes, bytes]:
    assert not (directory / CHECKPOINT_NAME).exists()
    return (directory / INFO_NAME).read_bytes(), (directory / TABLE_NAME).read_bytes()


def test_counts_and_corpora_are_added(tmp_path: Path) -> None:
    sources = [_build(tmp_path / "a", TEXT), _build(tmp_path / "b", [5, 6, 8, 5, 6, 8])]
    info = StatisticsMerge(tmp_path / "m", sources).run()
    merged = StatisticsDatabase.open(tmp_path / "m")
    assert dict(most_frequent(merged.rows, merged.size, [5, 6], 5)) == {8: 3, 7: 2}
    assert info.num_tokens == 15


@pytest.mark.parametrize(
    ("followers", "wanted"),
    [
        ((7, 7, 7, 8, 8), {7: 0.6, 8: 0.4}),
        ((7, 8, 8, 7, 7), {7: 0.6, 8: 0.4}),
        ((1, 2, 3, 4, 6, 7, 8, 9), dict.fromkeys((1, 2, 3, 4, 6, 7, 8, 9), 0.125)),
    ],
)
def test_shares_are_those_of_all_texts_in_whatever_order(
    tmp_path: Path, followers: tuple[int, ...], wanted: dict[int, float]
) -> None:
    """Also where no row can hold the counts of a context, of which others are rare."""
    sources = [
        _build(tmp_path / f"{number}", [5, follower] * 3000 + [5, 90])
        for number, follower in enumerate(followers)
    ]
    StatisticsMerge(tmp_path / "m", sources).run()
    merged = StatisticsDatabase.open(tmp_path / "m")
    found = dict(most_frequent(merged.rows, merged.size, [5], 9))
    shares = {token: count / sum(found.values()) for token, count in found.items() if token != 90}
    assert shares == pytest.approx(wanted, abs=0.01)


def test_a_source_that_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    """Opening looks at the ends of a table; what is merged is read whole before."""
    sources = _sources(tmp_path, 2)
    merge = StatisticsMerge(tmp_path / "m", sources)
    table = sources[1] / TABLE_NAME
    with table.open("r+b") as file:
        file.seek(table.stat().st_size // 2)
        file.write(bytes([file.read(1)[0] ^ 1]))
    with pytest.raises(SnapshotError, match="corrupt"):
        merge.run()
    assert not (tmp_path / "m" / INFO_NAME).exists()


def test_sources_are_merged_as_they_were_opened(tmp_path: Path) -> None:
    """Also where one was replaced before its turn came."""
    sources = _sources(tmp_path, 2)
    StatisticsMerge(tmp_path / "whole", sources).run()
    merge = StatisticsMerge(tmp_path / "m", sources)
    for _ in range(2):
        _build(sources[1], TEXT)
    merge.run()
    assert _content(tmp_path / "m") == _content(tmp_path / "whole")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    a, b = _build(tmp_path / "a", TEXT), _build(tmp_path / "b", TEXT, tokenizer="other")
    with pytest.raises(DatabaseError, match="cannot be merged"):
        StatisticsMerge(tmp_path / "m", [a, b]).run()
    with pytest.raises(DatabaseError, match="target"):
        StatisticsMerge(tmp_path / "a", [a])
    with pytest.raises(DatabaseError, match="nothing to merge"):
        StatisticsMerge(tmp_path / "m", [])


@pytest.mark.parametrize("max_bytes", [1 << 12, 1 << 20], ids=["forgets", "keeps"])
def test_interrupted_anywhere_it_writes_the_same(tmp_path: Path, max_bytes: int) -> None:
    """Byte for byte, from what was saved last; sources that were merged are not read again."""
    sources = _sources(tmp_path, 5)
    options = {"max_bytes": max_bytes, "checkpoint_s": 0.0}
    StatisticsMerge(tmp_path / "whole", sources, max_bytes=max_bytes).run()
    for stops_after in (1, 3, 4):
        target, num_merged = tmp_path / f"after {stops_after}", 0

        def note() -> None:
            nonlocal num_merged
            num_merged += 1
            if num_merged == stops_after:  # noqa: B023 - runs within the round
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            StatisticsMerge(target, sources, on_progress=note, **options).run()  # type: ignore[arg-type]
        job = StatisticsMerge(target, sources, **options)  # type: ignore[arg-type]
        assert job.num_resumed == stops_after
        job.run()
        assert _content(target) == _content(tmp_path / "whole")


def test_another_unfinished_merge_is_refused(tmp_path: Path) -> None:
    """Of other sources or another order, of another bound, and one that is broken."""
    sources, target = _sources(tmp_path, 3), tmp_path / "m"

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StatisticsMerge(target, sources, checkpoint_s=0.0, on_progress=stop).run()
    for others in (sources[::-1], sources[:2]):
        with pytest.raises(DatabaseError, match="other inputs or settings"):
            StatisticsMerge(target, others)
    with pytest.raises(DatabaseError, match="other inputs or settings"):
        StatisticsMerge(target, sources, max_bytes=1 << 20)
    (target / CHECKPOINT_NAME / TABLE_NAME).write_bytes(b"")
    with pytest.raises(DatabaseError, match="unfinished job cannot be resumed; delete it"):
        StatisticsMerge(target, sources)
    shutil.rmtree(target / CHECKPOINT_NAME)
    assert StatisticsMerge(target, sources).num_resumed == 0


def test_half_a_progress_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted while it says how far it has come, a job begins anew."""
    builder = StatisticsBuilder("t", 100, max_bytes=1 << 20)
    builder.add("corpus", TEXT)
    checkpoint = Checkpoint(tmp_path / "merged", MergeProgress)
    progress = MergeProgress(sources=(), max_bytes=1, num_merged=0)
    replace, interruptions = Path.replace, []

    def interrupted(path: Path, target: Path) -> Path:
        if target.name != PROGRESS_NAME:
            return replace(path, target)
        interruptions.append(path.read_bytes())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(builder, progress)
    assert interruptions == [progress.model_dump_json().encode()]
    assert checkpoint.load() is None


def test_one_checkpoint_is_whole_wherever_the_next_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of the changes that it makes to what lies on the disk; then it is saved again."""
    num_calls = 0
    while _is_whole_though_interrupted(tmp_path / f"{num_calls}", monkeypatch, num_calls):
        num_calls += 1
    assert num_calls > 1


def _is_whole_though_interrupted(
    directory: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> bool:
    """False where the change of this number is never made."""
    checkpoint = Checkpoint(directory, MergeProgress)
    builder = StatisticsBuilder("t", 100, max_bytes=1 << 20)

    def save(number: int) -> None:
        builder.add("corpus", TEXT)
        checkpoint.save(builder, MergeProgress(sources=(), max_bytes=1, num_merged=number))

    def num_saved() -> tuple[int, int]:
        found = checkpoint.load()
        assert found is not None
        return found[0].num_merged, found[1].info.num_tokens // len(TEXT)

    save(1)
    save(2)
    calls, is_interrupted = itertools.count(), True
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        for owner, name in (
            (Path, "replace"),
            (Path, "rename"),
            (Path, "unlink"),
            (shutil, "rmtree"),
        ):
            patch.setattr(owner, name, interrupted_at(num_calls, calls, getattr(owner, name)))
        save(3)
        is_interrupted = False
    assert num_saved() in (((2, 2), (3, 3)) if is_interrupted else ((3, 3),))
    save(4)
    assert num_saved() == (4, 4)
    checkpoint.remove()
    assert list(directory.iterdir()) == []
    return is_interrupted


def test_the_command_goes_on(tmp_path: Path) -> None:
    """After a real Ctrl-C."""
    sources = [str(source) for source in _sources(tmp_path, 4)] * 60
    target, whole = tmp_path / "merged", tmp_path / "whole"
    command = ["statistics", "merge", *sources, "--checkpoint-s", "0", "--output"]
    saved = target / CHECKPOINT_NAME / PROGRESS_NAME
    told = interrupt_when(saved.exists, *command, str(target))
    assert "interrupted; the same command keeps what was saved last" in told
    assert not (target / INFO_NAME).exists()
    for directory in (target, whole):
        result = CliRunner().invoke(app, [*command, str(directory)], catch_exceptions=False)
        assert result.exit_code == 0
    assert _content(target) == _content(whole)

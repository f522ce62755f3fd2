"""Each output reaches each reader once, unless it was evicted first; namespaces never mix."""

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hdserve.databases import output_log, seen_outputs, snapshot
from hdserve.databases.messages import Reply
from hdserve.databases.output_log import (
    MAX_CALIBRATION_BYTES,
    MIN_CLEARED_PARTITIONS,
    OutputLog,
)
from hdserve.databases.seen_outputs import (
    MAX_INTERVALS,
    MAX_KEPT_ORIGINS,
    MAX_ORIGINS,
    SeenOutputs,
    SequenceRanges,
)
from hdserve.databases.segment import (
    BYTES_PER_OUTPUT,
    MAX_OUTPUT_TOKENS,
    Segment,
    concatenate,
    split_output,
)
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseError, SnapshotError


def output(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.uint32)


def segment(origin: str, first: int, *outputs: np.ndarray) -> Segment:
    return Segment.from_outputs(origin, first, outputs)


def texts(segment: Segment) -> list[tuple[int, ...]]:
    return [tuple(item.tolist()) for item in segment.outputs()]


def names(segment: Segment) -> list[tuple[str, int]]:
    return [
        (segment.origins[index], number)
        for index, number in zip(
            segment.origin_index.tolist(), segment.sequence_numbers.tolist(), strict=True
        )
    ]


def read_all(log: OutputLog, namespace: str, origin: str | None = None) -> Segment:
    cursor, found = 0, []
    while True:
        changes = log.changes_since({namespace: cursor}, max_bytes=1000, exclude_origin=origin)
        if namespace not in changes:
            return concatenate(found)
        found.append(changes[namespace].segment)
        cursor = changes[namespace].cursor


class LogMachine(RuleBasedStateMachine):
    """Replicas append (some twice), readers read in small replies, everything interleaved.

    An output's token ids name its namespace, origin and number, so a mix-up shows in the text.
    """

    namespaces = ("alpha", "beta")
    origins = ("r0", "r1", "r2")

    @initialize(max_bytes=st.sampled_from([300, 2_000, 100_000]))
    def begin(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.log = OutputLog(max_bytes, 2 * max_bytes - 100, chunk_bytes=100)
        self.numbers = {(n, o): 0 for n in self.namespaces for o in self.origins}
        self.delivered: dict[tuple[str, str], list[tuple[str, int]]] = {}
        self.cursors: dict[tuple[str, str], int] = {}
        self.sent: list[tuple[str, Segment]] = []
        self.kept: dict[str, list[tuple[str, int]]] = {n: [] for n in self.namespaces}

    def make(self, namespace: str, origin: str, lengths: list[int]) -> Segment:
        first = self.numbers[namespace, origin]
        self.numbers[namespace, origin] += len(lengths)
        mark = self.namespaces.index(namespace) * 10 + self.origins.index(origin)
        return Segment.from_outputs(
            origin,
            first,
            [
                np.full(length, 1000 * (first + index) + mark, np.uint32)
                for index, length in enumerate(lengths)
            ],
        )

    @rule(
        namespace=st.sampled_from(namespaces),
        origin=st.sampled_from(origins),
        lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    )
    def append(self, namespace: str, origin: str, lengths: list[int]) -> None:
        new = self.make(namespace, origin, lengths)
        self.sent.append((namespace, new))
        appended = self.log.append(namespace, new)
        assert names(concatenate([item.segment for item in appended])) == names(new)
        self.kept[namespace] += names(new)

    @rule(data=st.data())
    def append_again(self, data: st.DataObject) -> None:
        """A publisher that does not know whether its message arrived sends it again."""
        if self.sent:
            namespace, old = data.draw(st.sampled_from(self.sent))
            assert self.log.append(namespace, old) == []

    @rule(reader=st.sampled_from(origins), room=st.integers(1, 400), data=st.data())
    def read(self, reader: str, room: int, data: st.DataObject) -> None:
        order = data.draw(st.permutations(self.namespaces))
        cursors = {n: self.cursors.get((reader, n), 0) for n in order}
        changes = self.log.changes_since(cursors, max_bytes=room, exclude_origin=reader)
        sizes = [change.segment.num_bytes for change in changes.values()]
        assert sum(sizes) <= max(room, 30 * 4 + BYTES_PER_OUTPUT)
        for namespace, change in changes.items():
            self.cursors[reader, namespace] = change.cursor
            for text in texts(change.segment):
                assert text[0] % 1000 // 10 == self.namespaces.index(namespace)
            self.delivered.setdefault((reader, namespace), []).extend(names(change.segment))

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "log"):
            return
        assert self.log.num_bytes <= 2 * self.max_bytes - 100
        partitions = [self.log.partition(namespace) for namespace in self.log.namespaces()]
        assert self.log.num_bytes == sum(partition.num_bytes for partition in partitions)
        for namespace in self.log.namespaces():
            assert self.log.partition(namespace).num_bytes <= self.max_bytes

    def teardown(self) -> None:
        """Every reader reads to the end: it has each output once that was there to be read."""
        if not hasattr(self, "log"):
            return
        for reader in self.origins:
            for namespace in self.namespaces:
                kept = concatenate([s for _, s in self.log.partition(namespace).segments()])
                while True:
                    cursor = self.cursors.get((reader, namespace), 0)
                    changes = self.log.changes_since(
                        {namespace: cursor}, max_bytes=200, exclude_origin=reader
                    )
                    if not changes:
                        break
                    self.cursors[reader, namespace] = changes[namespace].cursor
                    self.delivered.setdefault((reader, namespace), []).extend(
                        names(changes[namespace].segment)
                    )
                got = self.delivered.get((reader, namespace), [])
                expected = [name for name in self.kept[namespace] if name[0] != reader]
                assert len(got) == len(set(got))
                assert [name for name in expected if name in set(got)] == got
                assert {name for name in names(kept) if name[0] != reader} <= set(got)
                if self.max_bytes == 100_000:
                    assert got == expected


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_reader_behind_the_log_gets_all_that_is_kept():
    log = OutputLog(400, 10_000, chunk_bytes=100)
    for number in range(100):
        log.append("n", segment("a", number, output(number, number, number)))
    kept = texts(read_all(log, "n"))
    assert kept == [(number,) * 3 for number in range(100 - len(kept), 100)]
    assert 300 <= len(kept) * (12 + BYTES_PER_OUTPUT) <= 400


@pytest.mark.parametrize("cursor", [0, 1, 2, 40])
def test_a_reader_far_behind_gets_as_much_of_the_newest_as_it_wants(cursor):
    """One that comes back after a while, too; it is no reason to forget what it has."""
    log = OutputLog(10**6, 10**6, chunk_bytes=100)
    for number in range(100):
        log.append("n", segment("a", number, output(number, number, number)))
    options = {"max_bytes": 10**6, "catch_up_bytes": 300}
    found = log.changes_since({"n": cursor}, **options)["n"]
    got = [tuple(each.tolist()) for each in found.segment.outputs()]
    assert got == [(number,) * 3 for number in range(100 - len(got), 100)]
    assert 300 <= found.segment.num_bytes <= 500
    assert not found.is_flushed
    assert found.is_complete
    assert log.changes_since({"n": found.cursor}, **options) == {}


def test_the_largest_namespace_gives_way_first():
    log = OutputLog(10_000, 3_000, chunk_bytes=500)
    log.append("quiet", segment("a", 0, output(1, 2, 3)))
    for number in range(200):
        log.append("busy", segment("a", number, output(*range(20))))
    assert texts(read_all(log, "quiet")) == [(1, 2, 3)]
    assert log.num_bytes <= 3_000


def test_an_output_larger_than_the_room_still_comes():
    log = OutputLog(10**6, 10**6)
    log.append("n", segment("a", 0, np.ones(MAX_OUTPUT_TOKENS, np.uint32), output(5)))
    first = log.changes_since({"n": 0}, max_bytes=10)["n"]
    assert (len(first.segment), first.is_complete) == (1, False)
    second = log.changes_since({"n": first.cursor}, max_bytes=100)["n"]
    assert (texts(second.segment), second.is_complete) == ([(5,)], True)


def test_own_outputs_are_passed_over():
    log = OutputLog(10**6, 10**6)
    log.append("n", segment("a", 0, output(1), output(2)))
    log.append("n", segment("b", 0, output(3)))
    log.append("n", segment("a", 2, output(4)))
    assert texts(read_all(log, "n", origin="a")) == [(3,)]
    assert texts(read_all(log, "n", origin="b")) == [(1,), (2,), (4,)]


def test_nothing_new_is_an_empty_answer():
    log = OutputLog(10**6, 10**6)
    log.append("n", segment("a", 0, output(1)))
    cursor = log.changes_since({"n": 0}, max_bytes=100)["n"].cursor
    assert log.changes_since({"n": cursor, "never": 0}, max_bytes=100) == {}


def test_flush_tells_old_readers_and_only_them():
    log = OutputLog(10**6, 10**6)
    log.append("n", segment("a", 0, output(1), output(2)))
    log.set_calibration("n", b"state")
    cursor = log.changes_since({"n": 0}, max_bytes=100)["n"].cursor
    log.flush("n")
    log.append("n", segment("a", 2, output(3)))
    old = log.changes_since({"n": cursor - 1}, max_bytes=100)["n"]
    assert (old.is_flushed, texts(old.segment)) == (True, [(3,)])
    new = log.changes_since({"n": 0}, max_bytes=100)["n"]
    assert (new.is_flushed, texts(new.segment), new.calibration) == (False, [(3,)], b"")
    assert log.append("n", segment("a", 0, output(1), output(2))) == []


def test_what_was_flushed_by_a_second_flush_can_be_imported():
    log = OutputLog(10**6, 10**6)
    log.flush("n")
    flushed = segment("a", 0, output(1), output(2))
    log.append("n", flushed)
    log.flush("n")
    log.append("n", log.partition("n").as_imported(flushed))
    assert texts(log.changes_since({"n": 0}, max_bytes=1000)["n"].segment) == [(1,), (2,)]


def test_a_reader_that_had_everything_is_told_of_a_flush():
    log = OutputLog(10**6, 10**6)
    log.append("n", segment("a", 0, output(1)))
    cursor = log.changes_since({"n": 0}, max_bytes=100)["n"].cursor
    log.flush("n")
    change = log.changes_since({"n": cursor}, max_bytes=100)["n"]
    assert change.is_flushed
    assert log.flushes_since({"n": change.cursor}) == {}


def test_calibration_rides_along_once():
    log = OutputLog(10**6, 10**6)
    log.set_calibration("n", b"one")
    log.set_calibration("n", b"two")
    change = log.changes_since({"n": 0}, max_bytes=1000, exclude_origin="b")["n"]
    assert change.calibration == b"two"
    known = {"n": change.calibration_version}
    cursors = {"n": change.cursor}
    assert log.changes_since(cursors, max_bytes=1000, calibration_versions=known) == {}


def test_merged_calibration_goes_to_everyone():
    log = OutputLog(10**6, 10**6, merge_calibration=lambda kept, new: kept + new)
    log.set_calibration("n", b"one")
    log.set_calibration("n", b"two")
    change = log.changes_since({"n": 0}, max_bytes=1000, exclude_origin="b")["n"]
    assert change.calibration == b"onetwo"


def test_calibration_that_does_not_fit_comes_with_the_next_reply():
    log = OutputLog(10**6, 10**6)
    log.append("full", segment("a", 0, output(*range(100))))
    log.set_calibration("n", bytes(500))
    changes = log.changes_since({"full": 0, "n": 0}, max_bytes=600)
    assert not changes["n"].is_complete
    assert changes["n"].calibration is None
    rest = log.changes_since(
        {"full": changes["full"].cursor, "n": changes["n"].cursor}, max_bytes=600
    )
    assert rest["n"].calibration == bytes(500)


def test_little_more_is_given_up_at_once_than_must_be(monkeypatch):
    """As nobody is answered meanwhile."""
    monkeypatch.setattr(output_log, "MAX_SPARE_BYTES", 1000)
    log = OutputLog(10**6, 10**6, chunk_bytes=1000)
    before = 0
    for number in range(300):
        log.append(str(number % 50), segment("a", number, output(*range(1000))))
        assert log.num_bytes >= before - 1000 - 2 * 4100
        before = log.num_bytes
    assert before > 10**6 - 3 * 4100


def test_a_long_output_is_not_held_up_by_calibrations():
    """Each poll finds another one, and the two do not fit together."""
    log = OutputLog(10**6, 10**6)
    log.append("n", segment("a", 0, output(1), output(*range(200)), output(2)))
    cursors, known, found = {"n": 0}, {"n": 0}, []
    for number in range(9):
        log.set_calibration("n", bytes([number]) * 500)
        change = log.changes_since(cursors, max_bytes=1000, calibration_versions=known)["n"]
        found += texts(change.segment)
        cursors, known = {"n": change.cursor}, {"n": change.calibration_version}
    assert found == [(1,), (*range(200),), (2,)]
    assert change.calibration == bytes([8]) * 500


def test_calibration_is_bounded_and_a_failing_merge_is_an_error():
    log = OutputLog(10**6, 10**6, merge_calibration=lambda kept, new: kept[:100][9999] + new)
    with pytest.raises(DatabaseError, match="over the"):
        log.set_calibration("n", bytes(MAX_CALIBRATION_BYTES + 1))
    log.set_calibration("n", b"x")
    with pytest.raises(DatabaseError, match="cannot be merged"):
        log.set_calibration("n", b"y")


def test_calibration_that_merged_would_be_too_large_is_replaced():
    log = OutputLog(10**6, 10**6, merge_calibration=lambda kept, new: kept + new)
    log.set_calibration("n", bytes(MAX_CALIBRATION_BYTES))
    log.set_calibration("n", b"new")
    assert log.partition("n").calibration == b"new"


def test_the_calibrations_of_all_namespaces_are_bounded():
    """The one set longest ago is dropped, and a namespace of which nothing is left forgotten."""
    log = OutputLog(2**16, 2**16)
    state = bytes(MAX_CALIBRATION_BYTES // 4)
    for number in range(3):
        log.set_calibration(str(number), state)
    log.set_calibration("0", state)
    log.set_calibration("3", state)
    log.set_calibration("4", state)
    kept = {name for name in log.namespaces() if log.partition(name).calibration}
    assert kept == {"0", "2", "3", "4"}
    assert log.num_calibration_bytes == MAX_CALIBRATION_BYTES
    for number in range(2 * MIN_CLEARED_PARTITIONS):
        log.set_calibration(f"tenant {number}", state)
    assert len(log.namespaces()) <= MIN_CLEARED_PARTITIONS
    log.flush("tenant 0")
    assert log.num_calibration_bytes == MAX_CALIBRATION_BYTES


def test_calibration_of_a_namespace_that_was_forgotten_is_news_again():
    log = OutputLog(2**16, 2**16)
    state = bytes(MAX_CALIBRATION_BYTES)
    log.set_calibration("n", state)
    known = log.changes_since({"n": 0}, max_bytes=10**6)["n"]
    for number in range(2 * MIN_CLEARED_PARTITIONS):
        log.set_calibration(f"tenant {number}", state)
    assert "n" not in log.namespaces()
    log.set_calibration("n", state)
    versions = {"n": known.calibration_version}
    found = log.changes_since({"n": known.cursor}, max_bytes=10**6, calibration_versions=versions)
    assert found["n"].calibration == state


def test_refill_is_what_is_missing_elsewhere():
    here, there = OutputLog(10**6, 10**6), OutputLog(10**6, 10**6)
    for number in range(20):
        here.append("n", segment("ab"[number % 2], number // 2, output(number)))
    there.append("n", segment("a", 4, output(8), output(10)))
    missing = here.partition("n").missing_from(there.partition("n").seen())
    there.append("n", missing)
    assert sorted(texts(read_all(there, "n"))) == [(number,) for number in range(20)]
    assert len(here.partition("n").missing_from(there.partition("n").seen())) == 0


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=40))
def test_sequence_ranges_are_a_set_of_integers(additions):
    ranges, reference = SequenceRanges(), set()
    for start, length in additions:
        added = [n for low, high in ranges.add(start, start + length) for n in range(low, high)]
        assert added == sorted(set(range(start, start + length)) - reference)
        reference |= set(range(start, start + length))
        assert all(ranges.has_all(n, n + 1) == (n in reference) for n in range(80))
    intervals = ranges.intervals()
    assert all(low < high for low, high in intervals)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(intervals))


def test_sequence_ranges_are_bounded():
    ranges = SequenceRanges((2 * n, 2 * n + 1) for n in range(2 * MAX_INTERVALS))
    assert len(ranges.intervals()) == MAX_INTERVALS
    assert ranges.has_all(4 * MAX_INTERVALS - 2, 4 * MAX_INTERVALS - 1)


def test_the_origin_that_was_met_last_longest_ago_is_forgotten():
    """Not the first one, which may be the busiest."""
    seen = SeenOutputs()
    for number in range(MAX_ORIGINS):
        seen.add(segment(f"r{number}", 0, output(1)))
    seen.add(segment("r0", 1, output(2)))
    seen.add(segment("new", 0, output(1)))
    seen.trim()
    assert set(seen.ranges()) == {"new", *(f"r{number}" for number in range(MAX_ORIGINS))} - {"r1"}
    restored = SeenOutputs(seen.ranges())
    restored.add(segment("newer", 0, output(1)))
    restored.trim()
    assert set(seen.ranges()) - set(restored.ranges()) == {"r2"}


def test_the_origins_of_what_all_namespaces_evicted_are_bounded(monkeypatch):
    """The last ones of each are known."""
    monkeypatch.setattr(seen_outputs, "MAX_TOTAL_ORIGINS", 1000)
    log = OutputLog(0, 0)
    for name in "abcdefghij":
        log.append(name, segment("r", 0, output(1)))
    for number in range(300):
        for name in "abcdefghij":
            log.append(name, segment(f"r{number}", 0, output(1)))
    last = {f"r{number}" for number in range(200, 300)}
    assert all(log.partition(name).seen().keys() == last for name in "abcdefghij")


def test_a_namespace_knows_more_origins_where_others_know_few(monkeypatch):
    """What is sent again then counts once, however many namespaces and replicas there are."""
    monkeypatch.setattr(seen_outputs, "MAX_TOTAL_ORIGINS", 1000)
    log = OutputLog(0, 0)
    for number in range(200):
        log.append(str(number), segment("r0", 0, output(1)))
    for is_first in (True, False):
        for number in range(250):
            appended = log.append("0", segment(f"r{number}", 0, output(1)))
            assert bool(appended) == (is_first and number > 0)


def few_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs may remember few of which nothing is kept."""
    monkeypatch.setattr(seen_outputs, "MAX_TOTAL_ORIGINS", 100)
    monkeypatch.setattr(seen_outputs, "MIN_ORIGINS", 4)


def test_what_is_kept_is_never_appended_again(monkeypatch):
    """However many namespaces and origins there are."""
    few_origins(monkeypatch)
    log = OutputLog(2**16, 2**20)
    ids = [(str(name), f"r{number}") for name in range(30) for number in range(50)]
    for name, origin in ids:
        assert log.append(name, segment(origin, 0, output(1)))
    for name, origin in ids:
        assert log.append(name, segment(origin, 0, output(1))) == []
        assert log.partition(name).has_seen(origin, 0, 1)
    partition = log.partition("0")
    assert len(partition.missing_from(log.partition("1").seen())) == 0


def test_what_is_kept_is_not_given_back_to_a_log_that_names_it(monkeypatch):
    """However many origins it names, and are new to it."""
    monkeypatch.setattr(seen_outputs, "MAX_ORIGINS", 10)
    log = OutputLog(2**16, 2**20)
    for number in range(40):
        log.append("n", segment(f"r{number}", 0, output(1)))
    partition = log.partition("n")
    seen = {origin: numbers for origin, numbers in partition.seen().items() if origin > "r2"}
    missing = partition.missing_from(seen)
    assert sorted(missing.origins) == sorted(partition.seen().keys() - seen.keys())


def test_origins_of_which_nothing_is_kept_are_forgotten_first(monkeypatch):
    few_origins(monkeypatch)
    log = OutputLog(400, 10**6, chunk_bytes=100)
    for number in range(60):
        for name in "abcde":
            log.append(name, segment(f"r{number}", 0, output(1, 2, 3)))
    for name in "abcde":
        partition = log.partition(name)
        kept = {origin for _, part in partition.segments() for origin in part.origins}
        first = 60 - len(kept)
        assert kept == {f"r{number}" for number in range(first, 60)}
        known = {f"r{number}" for number in range(first - 20, 60)}
        assert partition.seen().keys() == known
        assert partition.evicted.ranges().keys() == known - kept


def test_text_gives_way_where_it_is_least_for_each_origin_when_there_are_too_many(monkeypatch):
    """The names take memory, too."""
    monkeypatch.setattr(output_log, "MAX_TOTAL_ORIGINS", 100)
    log = OutputLog(2**15, 2**15, chunk_bytes=100)
    for number in range(90):
        log.append("busy", segment(f"r{number % 10}", number, output(*range(40))))
    for number in range(200):
        log.append("many", segment(f"r{number}", 0, output(1, 2)))
        assert log._origin_limit.num_kept <= 100
    assert log.partition("busy").num_outputs == 90
    assert 80 < log.partition("many").num_outputs <= 90
    assert texts(read_all(log, "many"))[-1] == (1, 2)


def test_the_origins_of_a_namespace_fit_into_a_message():
    log = OutputLog(2**24, 2**24)
    for number in range(3 * MAX_ORIGINS):
        log.append("n", segment(f"old{number}", 0, output(*range(10))))
    for number in range(MAX_KEPT_ORIGINS):
        log.append("n", segment(f"r{number}", 0, output(*range(10))))
    seen, kept = log.partition("n").seen(), log.partition("n").num_kept_origins
    assert MAX_KEPT_ORIGINS - 5000 < kept <= MAX_KEPT_ORIGINS
    assert len(seen) == kept + MAX_ORIGINS
    key = DatabaseKey("a-model", "f" * 32)
    reply = Reply("epoch", 1.0, False, {}, refill={"n": seen})
    assert Reply.decode(reply.encode(key), key).refill == {"n": seen}


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_origins_are_counted_where_they_are_kept(data):
    """Also those that a segment from elsewhere names twice, or of which it has nothing."""
    log = OutputLog(400, 700, chunk_bytes=100)
    for number in range(data.draw(st.integers(1, 40))):
        name = data.draw(st.sampled_from("ab"))
        if data.draw(st.integers(0, 9)) == 0:
            log.flush(name)
        origins = tuple(data.draw(st.lists(st.sampled_from("rstu"), min_size=1, max_size=4)))
        index = data.draw(st.integers(0, len(origins) - 1))
        made = segment("r", 2 * number, output(1), output(*range(20)))
        log.append(name, replace(made, origins=origins, origin_index=made.origin_index + index))
        check_origins(log)


def check_origins(log: OutputLog) -> None:
    num_kept = num_gone = 0
    for partition in map(log.partition, log.namespaces()):
        kept = {name for _, part in partition.segments() for name, _ in names(part)}
        assert partition.num_kept_origins == len(kept)
        assert kept <= partition.seen().keys()
        num_kept += len(kept)
        num_gone += sum(len(each.ranges().keys() - kept) for each in partition._names)
    assert log._origin_limit.num_kept == num_kept
    assert log._origin_limit.num_gone == num_gone


def test_namespaces_of_which_everything_was_evicted_are_removed_where_there_are_many(monkeypatch):
    """Not those that were flushed, or have calibration; readers go on behind what they had."""
    monkeypatch.setattr(output_log, "MIN_CLEARED_PARTITIONS", 512)
    log = OutputLog(10**6, 20_000)
    log.set_calibration("learned", b"state")
    log.append("flushed", segment("a", 0, output(1)))
    log.flush("flushed")
    log.append("n", segment("a", 0, output(*range(40)), output(2)))
    cursor = log.changes_since({"n": 0}, max_bytes=1000)["n"].cursor
    for number in range(2 * 512):
        log.append(f"tenant-{number}", segment("a", 0, output(*range(20))))
    assert log.num_bytes == sum(log.partition(name).num_bytes for name in log.namespaces())
    assert log.num_bytes <= 20_000
    assert len(log.namespaces()) <= 512
    assert {"learned", "flushed"} <= set(log.namespaces())
    assert "n" not in log.namespaces()
    check_origins(log)
    log.append("n", segment("a", 2, output(3)))
    change = log.changes_since({"n": cursor}, max_bytes=1000)["n"]
    assert (texts(change.segment), change.is_flushed) == ([(3,)], False)


def test_seen_outputs_are_told_apart_by_origin():
    seen = SeenOutputs()
    assert len(seen.add(segment("a", 0, output(1), output(2)))) == 2
    assert len(seen.add(segment("b", 0, output(1), output(2)))) == 2
    assert texts(seen.add(segment("a", 1, output(2), output(3)))) == [(3,)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1), min_size=1, max_size=4),
        ),
        max_size=5,
    )
)
def test_segments_survive_concatenation_wire_and_splitting(parts):
    made, expected = [], []
    for number, (origin, outputs) in enumerate(parts):
        made.append(segment(origin, 100 * number, *(output(*ids) for ids in outputs)))
        expected += [tuple(ids) for ids in outputs]
    whole = Segment.from_wire(concatenate(made).to_wire())
    assert texts(whole) == expected
    pieces = whole.split(60)
    assert [text for piece in pieces for text in texts(piece)] == expected
    assert [name for piece in pieces for name in names(piece)] == names(whole)
    assert all(piece.num_bytes <= 60 or len(piece) == 1 for piece in pieces)


def fields_of(segment: Segment) -> list[object]:
    arrays = (segment.origin_index, segment.sequence_numbers, segment.lengths, segment.token_ids)
    return [segment.origins, *((array.dtype, array.tolist()) for array in arrays)]


def parts_one_by_one(whole: Segment, max_bytes: int) -> list[list[int]]:
    """Which outputs are in which part, filled one after the other."""
    parts: list[list[int]] = []
    room = 0
    for index, length in enumerate(whole.lengths.tolist()):
        cost = 4 * length + BYTES_PER_OUTPUT
        if not parts or cost > room:
            parts.append([])
            room = max_bytes
        parts[-1].append(index)
        room -= cost
    return parts


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), max_size=30),
    st.integers(0, 400),
)
def test_a_segment_is_split_where_the_next_output_would_not_fit(outputs, max_bytes):
    """Into what selecting each part makes of it, and no part keeps the arrays of the whole."""
    made = [
        segment(origin, number, output(*range(number, number + length)))
        for number, (origin, length) in enumerate(outputs)
    ]
    whole = concatenate(made)
    parts = whole.split(max_bytes)
    expected = [
        whole.select(np.isin(np.arange(len(whole)), indices))
        for indices in parts_one_by_one(whole, max_bytes)
    ]
    assert [fields_of(part) for part in parts] == [fields_of(part) for part in expected]
    for part in parts if len(parts) > 1 else []:
        assert not np.shares_memory(part.token_ids, whole.token_ids)


def test_a_segment_whose_arrays_contradict_one_another_is_refused():
    good = segment("a", 0, output(1, 2), output(3)).to_wire()
    Segment.from_wire(good)
    bad = {
        "origins": [[], ["a", 1], None],
        "origin_index": [np.array([0, 1], np.uint16), np.zeros(1, np.uint16)],
        "sequence_numbers": [np.array([-1, 0], np.int64), np.zeros(2, np.int32)],
        "lengths": [np.array([2, 2], np.uint32), np.array([3, 0], np.uint32)],
        "token_ids": [np.zeros(2, np.uint32), np.zeros((3, 1), np.uint32), b"123"],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(SnapshotError):
                Segment.from_wire({**good, name: value})
    with pytest.raises(SnapshotError):
        Segment.from_wire([1, 2])


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from("abc"), min_size=1, max_size=3),
            st.lists(st.lists(st.integers(0, 2**17), min_size=1, max_size=4), max_size=3),
        ),
        max_size=6,
    )
)
def test_records_read_together_are_what_they_are_one_by_one(parts):
    made = []
    for number, (origins, outputs) in enumerate(parts):
        each = segment("", 100 * number, *(output(*ids) for ids in outputs))
        index = np.arange(len(each), dtype=np.uint16) % len(origins)
        made.append(replace(each, origins=tuple(origins), origin_index=index))
    together = Segment.from_records([snapshot.pack(each.to_wire()) for each in made])
    one_by_one = concatenate([Segment.from_wire(each.to_wire()) for each in made])
    assert texts(together) == texts(one_by_one)
    assert names(together) == names(one_by_one)
    assert fields_of(together)[2:] == fields_of(one_by_one)[2:]


def test_a_record_that_contradicts_itself_is_refused_among_others():
    """Even where the numbers of all records together are right."""
    wires = [segment("a", 0, output(7)).to_wire(), segment("a", 1, output(7, 8)).to_wire()]
    bad = {
        "origins": [([], ["a", "b"]), (None, ["a"])],
        "origin_index": [([], [0, 0]), ([1], [0])],
        "sequence_numbers": [([], [0, 1]), ([0], [-1]), ([0], [2**62])],
        "lengths": [([2], [1]), ([1, 2], []), ([0], [3])],
        "token_ids": [([7, 8], [7]), ([[7]], [7, 8]), (b"7", [7, 8])],
    }
    assert len(Segment.from_records([snapshot.pack(wire) for wire in wires])) == 2
    for name, pairs in bad.items():
        for pair in pairs:
            values = [as_in(wire[name], value) for wire, value in zip(wires, pair, strict=True)]
            changed = [{**wire, name: each} for wire, each in zip(wires, values, strict=True)]
            with pytest.raises(SnapshotError):
                Segment.from_records([snapshot.pack(wire) for wire in changed])
    for other in (b"", b"7", snapshot.pack([7]), snapshot.pack({})):
        with pytest.raises(SnapshotError):
            Segment.from_records([snapshot.pack(wires[0]), other])


def as_in(known: object, value: object) -> object:
    is_array = isinstance(known, np.ndarray) and isinstance(value, list)
    return np.array(value, known.dtype) if is_array else value


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_changed_byte_of_a_record_makes_no_difference_between_ways_to_read_it(place, change):
    record = bytearray(snapshot.pack(segment("a", 5, output(7), output(8, 9)).to_wire()))
    record[place % len(record)] ^= change
    try:
        alone = Segment.from_wire(snapshot.unpack(bytes(record)))
    except SnapshotError:
        with pytest.raises(SnapshotError):
            Segment.from_records([bytes(record)])
    else:
        assert fields_of(Segment.from_records([bytes(record)])) == fields_of(alone)


@pytest.mark.parametrize("num_tokens", [0, 1, MAX_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS + 1, 100_000])
def test_long_outputs_are_split_without_loss(num_tokens):
    token_ids = list(range(num_tokens))
    pieces = split_output(token_ids)
    assert [token for piece in pieces for token in piece] == token_ids
    assert all(1 <= len(piece) <= MAX_OUTPUT_TOKENS for piece in pieces)


def test_a_namespace_takes_little_beside_its_outputs() -> None:
    """There may be thousands, most of them small."""
    num_namespaces = 500

    def traced() -> int:
        log = OutputLog(10**9, 10**9)
        tracemalloc.start()
        try:
            for number in range(num_namespaces):
                log.partition(f"tenant-{number}")
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    least = min(traced() for _ in range(5))  # threads of other tests may allocate meanwhile
    assert least < num_namespaces * 1100


def test_many_small_outputs_take_little_more_memory_than_is_counted():
    """In namespaces whose tails never become chunks."""
    log = OutputLog(2**25, 2**25)
    tracemalloc.start()
    try:
        for number in range(100):
            for tenant in range(50):
                log.append(f"tenant-{tenant}", segment("r", number, np.arange(20, dtype=np.uint32)))
        num_traced, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert log.num_bytes == 5_000 * 94
    assert num_traced < 4 * log.num_bytes + 50 * 2**13

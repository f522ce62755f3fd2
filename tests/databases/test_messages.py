"""Messages come back as they were sent; whatever else arrives is refused."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.databases import snapshot
from hdserve.databases.messages import Poll, Position, Publish, Reply, Standing, refill_bytes
from hdserve.databases.output_log import Changes
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import SnapshotError

KEY = DatabaseKey("m", "f")
SEGMENT = Segment.from_outputs("a", 4, [np.array([1, 2], np.uint32), np.array([3], np.uint32)])

junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(), st.binary()),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=3), children, max_size=4)
    ),
    max_leaves=8,
)


def test_publish_comes_back():
    standings = {"n": Standing("epoch", 2**40)}
    sent = Publish("a", {"n": SEGMENT}, {"n": b"state"}, ("x", "y"), standings=standings)
    got = Publish.decode(sent.encode(KEY), KEY.fingerprint, KEY.model)
    assert (got.sender, got.calibrations, got.refilled) == ("a", {"n": b"state"}, ("x", "y"))
    assert got.standings == standings
    assert [output.tolist() for output in got.outputs["n"].outputs()] == [[1, 2], [3]]
    assert got.outputs["n"].sequence_numbers.tolist() == [4, 5]


def test_a_publish_counts_what_it_carries():
    """Over all namespaces."""
    sent = Publish("a", {"n": SEGMENT, "other": SEGMENT.select(np.array([True, False]))})
    assert (sent.num_outputs, Publish("a").num_outputs) == (3, 0)


@pytest.mark.parametrize("wire", [[], ["e"], [1, 1], ["e", -1], ["e", "1"], ["e", 1, 1]])
def test_a_standing_that_is_none_is_refused(wire):
    fields = snapshot.decode(Publish("a").encode(KEY), kind="publish", fingerprint=KEY.fingerprint)
    message = snapshot.encode({**fields, "standings": {"n": wire}}, kind="publish", key=KEY)
    with pytest.raises(SnapshotError, match="corrupt"):
        Publish.decode(message, KEY.fingerprint, KEY.model)


def test_poll_comes_back():
    sent = Poll("a", "epoch", {"n": Position(2**40, 3, 5)}, {"m": 7}, {"n": (3, 2**40)})
    assert Poll.decode(sent.encode(KEY), KEY) == sent


def test_reply_comes_back():
    changes = {"n": Changes(SEGMENT, 9, False, True, b"state", 3), "m": Changes(SEGMENT, 1, True)}
    sent = Reply("epoch", 0.5, True, changes, {"n": {"a": [(0, 3), (5, 9)]}}, True, ("n", "m"))
    got = Reply.decode(sent.encode(KEY), KEY)
    assert (got.epoch, got.next_poll_s, got.is_reset) == ("epoch", 0.5, True)
    assert (got.refill, got.is_unwritten, got.lost) == (sent.refill, True, ("n", "m"))
    assert not got.is_complete
    change = got.changes["n"]
    assert (change.cursor, change.is_complete, change.is_flushed) == (9, False, True)
    assert (change.calibration, change.calibration_version) == (b"state", 3)
    assert change.segment.num_tokens == 3


@given(
    st.text("n", max_size=300),
    st.dictionaries(st.text("r", max_size=300), st.integers(0, 300), max_size=5),
)
def test_a_request_for_a_refill_is_no_larger_than_was_said(namespace, num_intervals):
    seen = {origin: [(2**62, 2**62 + 1)] * num for origin, num in num_intervals.items()}
    map_bytes = 1
    assert len(snapshot.pack({namespace: seen})) - map_bytes <= refill_bytes(namespace, seen)


def test_a_namespace_of_which_nothing_is_said_is_covered_by_a_complete_reply_alone():
    done, waiting = Changes(SEGMENT, 1, True), Changes.waiting(1, 0)
    assert Reply("e", 1.0, changes={"n": done}).covers("m")
    reply = Reply("e", 1.0, changes={"n": done, "o": waiting})
    assert [reply.covers(name) for name in "nom"] == [True, False, False]


@settings(max_examples=200)
@given(kind=st.sampled_from(["publish", "poll", "reply"]), payload=junk, data=st.data())
def test_a_valid_envelope_around_junk_raises_nothing_but_a_snapshot_error(kind, payload, data):
    """Both arbitrary payloads and valid ones with one field exchanged."""
    good = {
        "publish": Publish("a", {"n": SEGMENT}, {"n": b"x"}, standings={"n": Standing()}),
        "poll": Poll("a", "e", {"n": Position()}, {"m": 1}, {"n": (0, 1)}),
        "reply": Reply("e", 1.0, False, {"n": Changes(SEGMENT, 1, True)}, {"n": {"a": [(0, 1)]}}),
    }[kind]
    if data.draw(st.booleans()):
        fields = snapshot.decode(good.encode(KEY), kind=kind, fingerprint=KEY.fingerprint)
        fields[data.draw(st.sampled_from(sorted(fields)))] = payload
        payload = fields
    message = snapshot.encode(payload, kind=kind, key=KEY)
    with contextlib.suppress(SnapshotError):
        if kind == "publish":
            Publish.decode(message, KEY.fingerprint, KEY.model)
        else:
            {"poll": Poll, "reply": Reply}[kind].decode(message, KEY)


@pytest.mark.parametrize("cursor", [-1, 2**63, True, "1"])
def test_a_poll_with_a_wrong_cursor_is_refused(cursor):
    payload = {"reader": "r", "epoch": "", "positions": {}, "idle": {"n": cursor}}
    with pytest.raises(SnapshotError):
        Poll.decode(snapshot.encode(payload, kind="poll", key=KEY), KEY)


@pytest.mark.parametrize("positions", [{"n": [0, 0]}, {"n": [0, 0, -1]}, {"n": [0, 0, True]}, [1]])
def test_a_poll_with_wrong_positions_is_refused(positions):
    payload = {"reader": "r", "epoch": "", "positions": positions}
    with pytest.raises(SnapshotError):
        Poll.decode(snapshot.encode(payload, kind="poll", key=KEY), KEY)

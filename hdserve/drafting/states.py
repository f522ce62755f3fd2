"""What drafters have learned, in the form sent between replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgpack

from hdserve.databases.output_log import MAX_CALIBRATION_BYTES
from hdserve.errors import SnapshotError

Shrink = Callable[[str, bytes, int], bytes]
"""Takes the name of a drafter, its state and a limit in bytes; returns a smaller state, or the same
one if shrinking fails."""

MAX_STATES_BYTES = MAX_CALIBRATION_BYTES * 15 // 16
"""The most bytes of the states of all drafters together; the rest of a message is for their
names."""


def as_state(found: object) -> bytes:
    """What a drafter has returned as a state.

    Raises:
        TypeError: it is none; in a message with those of others it would make all unreadable.
    """
    if not isinstance(found, bytes):
        raise TypeError(f"a state is bytes, not {type(found).__name__}")
    return found


def pack_states(states: Mapping[str, bytes]) -> bytes:
    """The states of several drafters, by name, as one message."""
    packed: bytes = msgpack.packb(dict(states))
    return packed


def fit_states(states: Mapping[str, bytes], shrink: Shrink) -> dict[str, bytes]:
    """The states, each shrunk as needed to fit one message together."""
    if len(fitting_states(states)) == len(states):
        return dict(states)
    share = MAX_STATES_BYTES // len(states)
    return fitting_states({name: shrink(name, state, share) for name, state in states.items()})


def fitting_states(states: Mapping[str, bytes]) -> dict[str, bytes]:
    """As many of the states, from the first, as fit one message."""
    found: dict[str, bytes] = {}
    for name, state in states.items():
        if len(pack_states({**found, name: state})) <= MAX_CALIBRATION_BYTES:
            found[name] = state
    return found


def unpack_states(data: bytes) -> dict[str, bytes]:
    """The inverse of :func:`pack_states`.

    Raises:
        SnapshotError: the message is corrupt.
    """
    try:
        states = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise SnapshotError(f"the drafters' states are corrupt: {error}") from error
    if not isinstance(states, dict) or not all(isinstance(s, bytes) for s in states.values()):
        raise SnapshotError("the drafters' states are of another form")
    return states

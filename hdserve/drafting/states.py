"""What drafters have learned, on its way between replicas."""

from __future__ import annotations

from collections.abc import Mapping

import msgpack

from hdserve.errors import SnapshotError


def pack_states(states: Mapping[str, bytes]) -> bytes:
    """The states of several drafters, by name, as one message."""
    packed: bytes = msgpack.packb(dict(states))
    return packed


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

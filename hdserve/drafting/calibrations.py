"""What drafting has learned in each namespace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from hdserve.drafting.calibration import MIN_NEW_TOKENS, Calibration
from hdserve.errors import SnapshotError

MAX_BYTES = 512 << 20
"""The most bytes of unpacked calibrations, each of 0.9 to 1.5 MB.  Beyond it the least recently
used are packed, except those that running requests learn in.  Packing one and unpacking another
takes some milliseconds of the engine's thread."""

MAX_PACKED_CALIBRATIONS = 1024
"""The most namespaces without a running request whose calibration is kept, some tens of kB each;
beyond it the oldest starts anew."""


class Calibrations:
    """A calibration for each namespace; those not in use are packed.

    Args:
        vocab_size: of the model.
        on_pack: called with a namespace that is no longer in use.
    """

    def __init__(self, vocab_size: int, on_pack: Callable[[str], None]) -> None:
        self._vocab_size = vocab_size
        self._on_pack = on_pack
        self._unpacked: dict[str, Calibration] = {}
        self._packed: dict[str, tuple[bytes, int]] = {}

    @property
    def num_kept(self) -> int:
        """Calibrations, packed ones included."""
        return len(self._unpacked) + len(self._packed)

    @property
    def num_bytes(self) -> int:
        """Memory of them all."""
        unpacked = sum(calibration.num_bytes for calibration in self._unpacked.values())
        return unpacked + sum(len(state) for state, _ in self._packed.values())

    def use(self, namespace: str) -> Calibration:
        """The calibration of a namespace, which is now the one used last.  A new namespace starts
        with the prior."""
        calibration = self._unpacked.pop(namespace, None)
        if calibration is None:
            calibration = self._unpack(namespace)
            self._make_room(calibration.num_bytes)
        self._unpacked[namespace] = calibration
        return calibration

    def _make_room(self, num_bytes: int) -> None:
        """Pack enough calibrations to make room for another of ``num_bytes``; all have the same
        size."""
        num_packed = 1 + len(self._unpacked) - max(1, MAX_BYTES // num_bytes)
        free = (name for name, known in self._unpacked.items() if not known.num_requests)
        for namespace in list(islice(free, max(0, num_packed))):
            self._pack(namespace, self._unpacked.pop(namespace))
            self._on_pack(namespace)

    def state(self, namespace: str) -> bytes | None:
        """The current state of a calibration in use, if enough was learned since the last call."""
        calibration = self._unpacked.get(namespace)
        if calibration is None or calibration.num_new_tokens < MIN_NEW_TOKENS:
            return None
        state = calibration.to_bytes()
        calibration.base_tokens = calibration.num_tokens
        return state

    def adopt(self, namespace: str, state: bytes) -> None:
        """Take over a state; what was learned here since the last one, or since it was shared, is
        merged into it.

        Raises:
            SnapshotError: it is corrupt, of another version or of another vocabulary.
        """
        adopted = Calibration.from_bytes(state)
        if adopted.vocab_size != self._vocab_size:
            raise SnapshotError("the calibration is of another vocabulary")
        known = self._unpacked.get(namespace)
        own = known or self._unpack(namespace)
        is_newer = adopted.num_tokens > own.base_tokens
        if known is None and is_newer and not own.num_new_tokens:
            adopted.base_tokens = adopted.num_tokens
            self._pack(namespace, adopted, state)
            return
        if is_newer:
            own.merge(adopted, own.base_tokens)
        own.base_tokens = max(own.base_tokens, adopted.num_tokens)
        if known is None:
            self._pack(namespace, own)

    def forget(self, namespace: str) -> None:
        """Start anew."""
        self._unpacked.pop(namespace, None)
        self._packed.pop(namespace, None)

    def _pack(self, namespace: str, calibration: Calibration, state: bytes = b"") -> None:
        """Keep a calibration packed: as ``state`` if that is given."""
        self._packed.pop(namespace, None)
        self._packed[namespace] = state or calibration.to_bytes(), calibration.base_tokens
        if len(self._packed) > MAX_PACKED_CALIBRATIONS:
            del self._packed[next(iter(self._packed))]

    def _unpack(self, namespace: str) -> Calibration:
        if namespace not in self._packed:
            return Calibration.prior(self._vocab_size)
        state, base_tokens = self._packed.pop(namespace)
        calibration = Calibration.from_bytes(state)
        calibration.base_tokens = base_tokens
        return calibration

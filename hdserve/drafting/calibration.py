"""What drafting has learned about its evidence: cells, mixer weights, token biases.

It belongs to a model, holds no text, starts from a prior that ships with the package, and can be
saved, sent to other replicas and merged.
"""

from __future__ import annotations

import zlib
from importlib import resources
from typing import Any, Self

import msgpack
import numpy as np
import numpy.typing as npt

from hdserve.databases.output_log import MAX_CALIBRATION_BYTES
from hdserve.drafting.arrays import (
    ABSENT_CELLS,
    BIAS_INPUT,
    CELL_COUNT,
    CELL_LOGIT,
    CELL_P,
    NUM_CELLS,
    NUM_INPUTS,
    NUM_LEVELS,
    NUM_ORDERS,
    NUM_PATTERNS,
    NUM_RANKS,
    NUM_SHARES,
    NUM_TOTALS,
    NUM_WEIGHT_SETS,
    PRESENT_CELLS,
    ROWS_PER_LEVEL,
    Floats,
    Learned,
    new_vectors,
)
from hdserve.drafting.handles import HandleTable
from hdserve.errors import SnapshotError

FORMAT_VERSION = 3
PRIOR_NAME = "prior.msgpack"
PRIOR_COUNT = 200.0
"""A cell of the prior counts as at most this many observations."""

MAX_STATE_BYTES = MAX_CALIBRATION_BYTES * 15 // 16
"""It shares a message with the states of other drafters."""

MAX_UNPACKED_BYTES = 2**24
"""A vocabulary of a million tokens takes 2 MB of it."""

MAX_NUM_TOKENS = 2**53

_MOST_BIASES = MAX_STATE_BYTES // 3
"""No more would fit: each takes three bytes and a half."""

MAX_WEIGHT = 8.0
"""Of weights and biases, which are below 0.9 and 2.9 after each of the recorded sets: on text that
repeats itself without end they would grow with every token, since no probability is above 0.997,
and what comes after it would be misjudged for as long."""

_TOKENS_PER_CHECK = 4096

_SCALE_MEMORY = 0.9995
_SCALE_PRIOR_TOKENS = 500.0
_SCALE_BOUND = 2.0

_CLIP = 0.0003
_SHARES = (0.015, 0.05, 0.11, 0.22, 0.4, 0.65, 0.9, 0.98)


class Calibration:
    """The learned state of one model's drafting.

    Attributes:
        cells: float32 ``[3, NUM_CELLS]``: probability, observations, logit.
        weights: float32 ``[NUM_WEIGHT_SETS, NUM_INPUTS]``.
        token_bias: float32 ``[vocab_size]``.
        handles: of the three arrays, for the compiled code that reads and updates them.
        num_tokens: how many tokens were learned from since the prior.
        expected_tokens, accepted_tokens: sums of the scores of verified nodes, uncorrected, and how
            many of these were accepted, of the last few thousand trees; older ones fade, and so
            does what a state begins with.
    """

    def __init__(self, vocab_size: int) -> None:
        self.cells: Floats = np.zeros((3, NUM_CELLS), np.float32)
        self.cells[CELL_P, :PRESENT_CELLS] = _first_guess()
        self.cells[CELL_P, PRESENT_CELLS:] = 0.01
        pointers = self.cells[CELL_P, PRESENT_CELLS + ABSENT_CELLS :].reshape(2, 2, 16, 8)
        pointers[:, 1] = np.linspace(0.4, 0.95, 16)[:, None] / np.linspace(1, 4, 8)
        self.weights: Floats = new_vectors(NUM_WEIGHT_SETS)
        self.weights[:NUM_PATTERNS, :BIAS_INPUT] = 0.3
        self.token_bias: Floats = np.zeros(vocab_size, np.float32)
        self.num_tokens = 0
        self.expected_tokens = _SCALE_PRIOR_TOKENS
        self.accepted_tokens = _SCALE_PRIOR_TOKENS
        self.handles = HandleTable(Learned(self.cells, self.weights, self.token_bias))
        self._update_logits()

    def _update_logits(self) -> None:
        p = np.clip(self.cells[CELL_P], _CLIP, 1 - _CLIP)
        self.cells[CELL_LOGIT] = np.log(p / (1 - p))

    @property
    def vocab_size(self) -> int:
        return len(self.token_bias)

    def count_tokens(self, num_tokens: int) -> None:
        """Note how many tokens were learned from; keeps weights and biases within their bounds."""
        before = self.num_tokens // _TOKENS_PER_CHECK
        self.num_tokens += num_tokens
        if self.num_tokens // _TOKENS_PER_CHECK != before:
            for array in (self.weights, self.token_bias):
                np.clip(array, -MAX_WEIGHT, MAX_WEIGHT, out=array)

    @property
    def scale(self) -> float:
        """What scores are multiplied with, so that their sum is what comes of them.

        Each probability is learned for what follows the text there is.  In a tree it is asked for
        what follows a guess, and of the right guesses more than of all.
        """
        ratio = self.accepted_tokens / max(self.expected_tokens, 1.0)
        return min(max(ratio, 1 / _SCALE_BOUND), _SCALE_BOUND)

    def count_tree(self, expected_tokens: float, num_accepted: int) -> None:
        """Note how many tokens of a verified tree its scores, as :attr:`scale` made them, expected
        to be accepted, and how many were."""
        uncorrected = expected_tokens / self.scale
        self.expected_tokens = self.expected_tokens * _SCALE_MEMORY + uncorrected
        self.accepted_tokens = self.accepted_tokens * _SCALE_MEMORY + num_accepted

    def to_bytes(self) -> bytes:
        """The state as compressed msgpack, at most ``MAX_STATE_BYTES``.

        Cells and weights take about 21 kB of it.  The token biases grow with the vocabulary: the
        largest that fit are kept.
        """
        bias = _largest(self.token_bias.astype(np.float16), _MOST_BIASES)
        while True:
            data = self._pack(bias)
            num_kept = int(np.count_nonzero(bias))
            if len(data) <= MAX_STATE_BYTES or not num_kept:
                return data
            bias = _largest(bias, num_kept * MAX_STATE_BYTES * 7 // (8 * len(data)))

    def _pack(self, token_bias: npt.NDArray[np.float16]) -> bytes:
        message = {
            "format": FORMAT_VERSION,
            "vocab_size": self.vocab_size,
            "num_tokens": self.num_tokens,
            "expected_tokens": self.expected_tokens,
            "accepted_tokens": self.accepted_tokens,
            "p": self.cells[CELL_P].astype(np.float16).tobytes(),
            "counts": self.cells[CELL_COUNT].astype(np.uint16).tobytes(),
            "weights": self.weights.astype(np.float16).tobytes(),
            "token_bias": token_bias.tobytes(),
        }
        packed: bytes = msgpack.packb(message)
        return zlib.compress(packed)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of :meth:`to_bytes`, up to half precision.

        Raises:
            SnapshotError: the data is corrupt, or of another version.
        """
        try:
            message: dict[str, Any] = msgpack.unpackb(_decompress(data))
            version = message["format"]
            if version != FORMAT_VERSION:
                raise SnapshotError(f"calibration of format {version}, not {FORMAT_VERSION}")
            vocab_size = int(message["vocab_size"])
            token_bias = _array(message["token_bias"], np.float16, vocab_size)
            state = cls(vocab_size)
            state.num_tokens = min(max(0, int(message["num_tokens"])), MAX_NUM_TOKENS)
            state.expected_tokens = _sum_of(message, "expected_tokens")
            state.accepted_tokens = _sum_of(message, "accepted_tokens")
            state.cells[CELL_P] = _array(message["p"], np.float16, NUM_CELLS)
            state.cells[CELL_COUNT] = _array(message["counts"], np.uint16, NUM_CELLS)
            weights = _array(message["weights"], np.float16, NUM_WEIGHT_SETS * NUM_INPUTS)
            state.weights[:] = weights.reshape(NUM_WEIGHT_SETS, NUM_INPUTS)
            state.token_bias[:] = token_bias
        except SnapshotError:
            raise
        except (
            *(zlib.error, ValueError, KeyError, TypeError, OverflowError),
            msgpack.UnpackException,
        ) as error:
            raise SnapshotError(f"the calibration is corrupt: {error}") from error
        state._update_logits()
        return state

    @classmethod
    def prior(cls, vocab_size: int) -> Self:
        """The state a new model begins with: what ships with the package, without token biases."""
        path = resources.files("hdserve.drafting").joinpath(PRIOR_NAME)
        if not path.is_file():
            return cls(vocab_size)
        shipped = cls.from_bytes(path.read_bytes())
        state = cls(vocab_size)
        state.cells[:] = shipped.cells
        np.minimum(state.cells[CELL_COUNT], PRIOR_COUNT, out=state.cells[CELL_COUNT])
        state.weights[:] = shipped.weights
        return state

    def for_vocabulary(self, vocab_size: int) -> Calibration:
        """A copy of cells and weights, without token biases."""
        copy = Calibration(vocab_size)
        copy.cells[:] = self.cells
        copy.weights[:] = self.weights
        return copy

    def merge(self, others: list[Calibration]) -> None:
        """Take over what other replicas of the same model have learned.

        Cells are averaged by their observations, weights and token biases by the number of tokens
        learned from, what scores were worth by the trees that were verified.

        Raises:
            SnapshotError: a state has another vocabulary.
        """
        states = [self, *others]
        if any(state.vocab_size != self.vocab_size for state in states):
            raise SnapshotError("the calibrations are of different vocabularies")
        counts = np.stack([state.cells[CELL_COUNT] for state in states])
        p = np.stack([state.cells[CELL_P] for state in states])
        shares = np.array([state.num_tokens + 1 for state in states], np.float64)
        shares /= shares.sum()
        merged_weights = sum(s * state.weights for s, state in zip(shares, states, strict=True))
        merged_bias = sum(s * state.token_bias for s, state in zip(shares, states, strict=True))
        shares_of_cells = (counts + 1e-3) / (counts + 1e-3).sum(0)
        self.cells[CELL_P] = (p * shares_of_cells).sum(0)
        self.cells[CELL_COUNT] = counts.max(0)
        self.weights[:] = merged_weights
        self.token_bias[:] = merged_bias
        self.num_tokens = max(state.num_tokens for state in states)
        self.expected_tokens = sum(state.expected_tokens for state in states) / len(states)
        self.accepted_tokens = sum(state.accepted_tokens for state in states) / len(states)
        self._update_logits()


def merge_states(first: bytes, second: bytes) -> bytes:
    """One state of two, each as from :meth:`Calibration.to_bytes`.

    Raises:
        SnapshotError: one is corrupt, of another version or of another vocabulary.
    """
    merged = Calibration.from_bytes(first)
    merged.merge([Calibration.from_bytes(second)])
    return merged.to_bytes()


def _largest(values: npt.NDArray[np.float16], num: int) -> npt.NDArray[np.float16]:
    """A copy with zeros for all but the ``num`` largest, by their absolute values."""
    if num >= np.count_nonzero(values):
        return values
    kept = np.zeros_like(values)
    places = np.argpartition(-np.abs(values), num)[:num]
    kept[places] = values[places]
    return kept


def _decompress(data: bytes) -> bytes:
    """What ``zlib.compress`` made smaller; a bomb is refused when it has gone off a little."""
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(data, MAX_UNPACKED_BYTES)
    if not unpacker.eof:
        raise SnapshotError("the calibration is corrupt: it ends early, or is too large")
    return found


def _sum_of(message: dict[str, Any], name: str) -> float:
    """A sum that states of earlier releases do not have."""
    value = float(message.get(name, _SCALE_PRIOR_TOKENS))
    if not 0.0 <= value <= MAX_NUM_TOKENS:
        raise SnapshotError(f"the calibration is corrupt: {name} is {value}")
    return value


def _array(data: bytes, dtype: Any, length: int) -> Any:
    array = np.frombuffer(data, dtype)
    if len(array) != length:
        raise SnapshotError(f"the calibration is corrupt: {len(array)} entries, not {length}")
    if not np.isfinite(array).all():
        raise SnapshotError("the calibration is corrupt: a value is not finite")
    return array


def _first_guess() -> Floats:
    """Probabilities of the present cells before anything was learned: shares, distrusted."""
    shares = np.array(_SHARES)[:, None] * np.array([0.35, 0.45, 0.6, 0.75, 0.9, 0.95])
    orders = np.array([0.4, 0.7, 0.85, 0.9, 0.95, 1.0, 1.0, 1.0])
    shape = (NUM_LEVELS, NUM_ORDERS, NUM_TOTALS, ROWS_PER_LEVEL, NUM_SHARES, NUM_RANKS)
    guess = orders[:, None, None, None, None] * shares.T[:, None, :, None]
    return np.broadcast_to(guess, shape).reshape(-1).astype(np.float32)

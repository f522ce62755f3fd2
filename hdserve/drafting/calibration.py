"""What drafting has learned about its evidence: cells, mixer weights, biases of tokens and pairs.

It belongs to one namespace of a model, and starts from a prior that ships with the package.  It
contains no text, but its biases reveal which tokens there were, so it never leaves the namespace.
Cells, mixer weights and biases of tokens can be saved, sent to other replicas and merged.
"""

from __future__ import annotations

import zlib
from functools import cache
from importlib import resources
from typing import Any, Self

import msgpack
import numpy as np

from hdserve.databases.ngram import Ints
from hdserve.drafting.arrays import (
    ABSENT_CELLS,
    BIAS_INPUT,
    CELL_COUNT,
    CELL_LOGIT,
    CELL_P,
    CHANCE_SET,
    NUM_CELLS,
    NUM_LENGTHS,
    NUM_LEVELS,
    NUM_MISSES,
    NUM_ORDERS,
    NUM_PAIRS,
    NUM_PATTERNS,
    NUM_RANKS,
    NUM_SHARES,
    NUM_TOKEN_WEIGHTS,
    NUM_TOTALS,
    NUM_WEIGHT_SETS,
    PRESENT_CELLS,
    ROWS_PER_LEVEL,
    Floats,
    Learned,
    new_vectors,
)
from hdserve.drafting.handles import HandleTable
from hdserve.drafting.states import MAX_STATES_BYTES
from hdserve.errors import SnapshotError

FORMAT_VERSION = 6

PRIOR_NAME = "prior.msgpack"
PRIOR_COUNT = 200.0
"""A cell of the prior counts as at most this many observations."""

MAX_UNPACKED_BYTES = 2**20
"""The most bytes of an unpacked state; with a vocabulary of a million tokens it takes a third of
this."""

MAX_NUM_TOKENS = 2**53

MIN_NEW_TOKENS = 1000
"""A calibration is shared again after learning from at least this many more tokens."""

_MOST_BIASES = MAX_STATES_BYTES // 4
"""About the most biases of tokens that fit: each takes two and a half bytes, and cells and weights
take a third of the state."""

_ZLIB_LEVEL = 3
"""Half the time of level 6, for 2 % more bytes."""

_LEAST_BIAS = 2.0**-20
"""Smaller ones are not sent; in half precision they might become 0."""

MAX_WEIGHT = 8.0
"""The bound of weights and biases, which stay below 0.9 and 2.7 on each of the recorded sets.  On
text that repeats itself endlessly they would grow with every token, because no probability exceeds
0.997, and later text would be misjudged for just as long."""

_TOKENS_PER_CHECK = 4096

_SCALE_MEMORY = 0.9995
"""The share of the sums of expected and accepted tokens that remains after each further tree."""

_SCALE_PRIOR_TOKENS = 500.0
"""The tokens that a new state counts as expected and as accepted."""

_SCALE_BOUND = 2.0
"""Scores are corrected by at most this factor, up or down."""

_UNSEEN_COUNT = np.float32(1e-3)
"""The number of observations a cell without any counts for when two states are merged."""

_CLIP = 0.0003
"""Logits of probabilities are between -8 and 8."""

_CHANCE_WEIGHTS = (0.87, 0.45, 0.19, -0.55)
"""The initial weights of probability, noise and share in a chance, and its initial bias."""

_SHARES = (0.015, 0.05, 0.11, 0.22, 0.4, 0.65, 0.9, 0.98)


class Calibration:
    """What drafting for one namespace has learned, or for one request that shares nothing.

    Attributes:
        cells: float32 ``[3, NUM_CELLS]``: probability, observations, logit.
        weights: float32 ``[NUM_WEIGHT_SETS, NUM_INPUTS]``.
        token_weights: float32 ``[NUM_TOKEN_WEIGHTS, NUM_INPUTS]``, of a candidate, of the strongest
            one and of the token before; neither sent nor merged.
        token_bias: float32 ``[vocab_size]``.
        pair_bias: float32 ``[2 * NUM_PAIRS]``, of a token after another, and of a token given the
            strongest one; neither sent nor merged.
        handles: of the five arrays, for the compiled code that reads and updates them.
        num_requests: how many running requests learn in it.
        num_tokens: how many tokens were learned from since the prior, in all merged states.
        base_tokens: the same when it was last shared or adopted.
        expected_tokens, accepted_tokens: sums of the uncorrected scores of verified nodes, and of
            how many of these were accepted, over the last few thousand trees; older trees, and the
            initial values, fade.
    """

    def __init__(self, vocab_size: int) -> None:
        self.cells: Floats = np.zeros((3, NUM_CELLS), np.float32)
        self.cells[CELL_P, :PRESENT_CELLS] = _first_guess()
        self.cells[CELL_P, PRESENT_CELLS:] = 0.01
        pointers = self.cells[CELL_P, PRESENT_CELLS + ABSENT_CELLS :].reshape(
            2, 2, NUM_LENGTHS, NUM_MISSES
        )
        by_length = np.linspace(0.4, 0.95, NUM_LENGTHS)
        pointers[:, 1] = by_length[:, None] / np.linspace(1, 4, NUM_MISSES)
        self.weights: Floats = new_vectors(NUM_WEIGHT_SETS)
        self.weights[:NUM_PATTERNS, :BIAS_INPUT] = 0.3
        self.weights[CHANCE_SET, : len(_CHANCE_WEIGHTS)] = _CHANCE_WEIGHTS
        self.token_weights: Floats = new_vectors(NUM_TOKEN_WEIGHTS)
        self.token_bias: Floats = np.zeros(vocab_size, np.float32)
        self.num_tokens = 0
        self.base_tokens = 0
        self.expected_tokens = _SCALE_PRIOR_TOKENS
        self.accepted_tokens = _SCALE_PRIOR_TOKENS
        self.pair_bias: Floats = np.zeros(2 * NUM_PAIRS, np.float32)
        self._learned = Learned(
            self.cells, self.weights, self.token_weights, self.token_bias, self.pair_bias
        )
        self.handles = HandleTable(self._learned)
        self.num_requests = 0
        self._update_logits()

    def _update_logits(self) -> None:
        p = np.clip(self.cells[CELL_P], _CLIP, 1 - _CLIP)
        self.cells[CELL_LOGIT] = np.log(p / (1 - p))

    @property
    def vocab_size(self) -> int:
        return len(self.token_bias)

    @property
    def num_bytes(self) -> int:
        """Memory of its arrays."""
        return sum(array.nbytes for array in self._learned)

    def count_tokens(self, num_tokens: int) -> None:
        """Note how many tokens were learned from; keeps weights and biases within their bounds."""
        before = self.num_tokens // _TOKENS_PER_CHECK
        self.num_tokens += num_tokens
        if self.num_tokens // _TOKENS_PER_CHECK != before:
            for array in (self.weights, self.token_weights, self.token_bias, self.pair_bias):
                np.clip(array, -MAX_WEIGHT, MAX_WEIGHT, out=array)

    @property
    def scale(self) -> float:
        """The factor for scores that makes their sum match the number of accepted tokens.

        Each probability is learned for what follows the actual text.  In a tree it is used after
        guesses, and more after right ones than after all.
        """
        ratio = self.accepted_tokens / max(self.expected_tokens, 1.0)
        return min(max(ratio, 1 / _SCALE_BOUND), _SCALE_BOUND)

    def count_tree(self, expected_tokens: float, num_accepted: int) -> None:
        """Note how many tokens of a verified tree its scores, scaled by :attr:`scale`, predicted to
        be accepted, and how many were."""
        uncorrected = expected_tokens / self.scale
        self.expected_tokens = self.expected_tokens * _SCALE_MEMORY + uncorrected
        self.accepted_tokens = self.accepted_tokens * _SCALE_MEMORY + num_accepted

    def to_bytes(self, max_bytes: int = MAX_STATES_BYTES) -> bytes:
        """The state as compressed msgpack, without the data of pairs and by token except the biases
        of tokens: at most ``max_bytes``, if cells and weights fit.

        Cells and weights take about 23 kB of it.  The token biases grow with the vocabulary: the
        largest that fit are kept.
        """
        num = _MOST_BIASES
        while True:
            biased_tokens = _most_biased(self.token_bias, num)
            data = self._pack(biased_tokens)
            if len(data) <= max_bytes or not len(biased_tokens):
                return data
            num = len(biased_tokens) * max_bytes * 7 // (8 * len(data))

    def _pack(self, biased_tokens: Ints) -> bytes:
        is_biased = np.zeros(self.vocab_size, np.bool_)
        is_biased[biased_tokens] = True
        message = {
            "format": FORMAT_VERSION,
            "vocab_size": self.vocab_size,
            "num_tokens": self.num_tokens,
            "base_tokens": self.base_tokens,
            "expected_tokens": self.expected_tokens,
            "accepted_tokens": self.accepted_tokens,
            "p": self.cells[CELL_P].astype(np.float16).tobytes(),
            "counts": np.rint(self.cells[CELL_COUNT]).astype(np.uint16).tobytes(),
            "weights": self.weights.astype(np.float16).tobytes(),
            "is_biased": np.packbits(is_biased).tobytes(),
            "token_bias": self.token_bias[biased_tokens].astype(np.float16).tobytes(),
        }
        packed: bytes = msgpack.packb(message)
        return zlib.compress(packed, _ZLIB_LEVEL)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of :meth:`to_bytes`, up to half precision.

        Raises:
            SnapshotError: the data is corrupt, or of another version.
        """
        try:
            message: dict[str, Any] = msgpack.unpackb(_decompress(data))
            if message["format"] != FORMAT_VERSION:
                raise SnapshotError(
                    f"calibration of format {message['format']}, not {FORMAT_VERSION}"
                )
            vocab_size = int(message["vocab_size"])
            is_biased = _array(message["is_biased"], np.uint8, -(-vocab_size // 8))
            biased_tokens = np.flatnonzero(np.unpackbits(is_biased, count=vocab_size))
            token_bias = _array(message["token_bias"], np.float16, len(biased_tokens))
            state = cls(vocab_size)
            state.num_tokens = min(max(0, int(message["num_tokens"])), MAX_NUM_TOKENS)
            state.base_tokens = min(max(0, int(message["base_tokens"])), state.num_tokens)
            state.expected_tokens = _sum_of(message, "expected_tokens")
            state.accepted_tokens = _sum_of(message, "accepted_tokens")
            state.cells[CELL_P] = _array(message["p"], np.float16, NUM_CELLS)
            state.cells[CELL_COUNT] = _array(message["counts"], np.uint16, NUM_CELLS)
            weights = _array(message["weights"], np.float16, state.weights.size)
            state.weights[:] = weights.reshape(state.weights.shape)
            state.token_bias[biased_tokens] = token_bias
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
        """The initial state of a new model: what ships with the package, without biases."""
        state = cls(vocab_size)
        shipped = _shipped()
        if shipped is not None:
            state.cells[:], state.weights[:] = shipped
        return state

    def copy(self) -> Calibration:
        """A calibration that starts with the same state, and learns by itself."""
        copy = self.for_vocabulary(self.vocab_size)
        copy.token_weights[:] = self.token_weights
        copy.token_bias[:] = self.token_bias
        copy.pair_bias[:] = self.pair_bias
        copy.num_tokens, copy.base_tokens = self.num_tokens, self.base_tokens
        copy.expected_tokens = self.expected_tokens
        copy.accepted_tokens = self.accepted_tokens
        return copy

    def for_vocabulary(self, vocab_size: int) -> Calibration:
        """A copy of cells and weights, without biases."""
        copy = Calibration(vocab_size)
        copy.cells[:] = self.cells
        copy.weights[:] = self.weights
        return copy

    @property
    def num_new_tokens(self) -> int:
        """How many tokens were learned from since it was last shared or adopted."""
        return self.num_tokens - self.base_tokens

    def merge(self, other: Calibration, base_tokens: int) -> None:
        """Take over what ``other`` has learned since the two were the same.

        Each counts by the tokens it has learned from since then, cells by their observations as
        well. So one that has learned nothing since has no effect, and of several that started from
        the same state the order does not matter.

        Args:
            base_tokens: how many tokens that common state had learned from.

        Raises:
            SnapshotError: ``other`` has another vocabulary.
        """
        if other.vocab_size != self.vocab_size:
            raise SnapshotError("the calibrations are of different vocabularies")
        num_own = max(0, self.num_tokens - base_tokens)
        num_other = max(0, other.num_tokens - base_tokens)
        self.num_tokens = min(base_tokens + num_own + num_other, MAX_NUM_TOKENS)
        share = num_other / (num_own + num_other) if num_own + num_other else 0.5
        own_counts = (1 - share) * (self.cells[CELL_COUNT] + _UNSEEN_COUNT)
        other_counts = share * (other.cells[CELL_COUNT] + _UNSEEN_COUNT)
        counts = own_counts + other_counts
        self.cells[CELL_P] += (other.cells[CELL_P] - self.cells[CELL_P]) * (other_counts / counts)
        self.cells[CELL_COUNT] = counts - _UNSEEN_COUNT
        for own, new in ((self.weights, other.weights), (self.token_bias, other.token_bias)):
            own += (new - own) * np.float32(share)
        self.expected_tokens += (other.expected_tokens - self.expected_tokens) * share
        self.accepted_tokens += (other.accepted_tokens - self.accepted_tokens) * share
        self._update_logits()


def merge_states(kept: bytes, new: bytes) -> bytes:
    """Merge two states, each from :meth:`Calibration.to_bytes`: returns ``new`` itself if nothing
    was merged into ``kept`` since ``new`` was last shared or adopted.

    Raises:
        SnapshotError: one is corrupt, of another version or of another vocabulary.
    """
    merged, other = Calibration.from_bytes(kept), Calibration.from_bytes(new)
    is_contained = kept == new or 0 < merged.num_tokens <= other.base_tokens
    merged.merge(other, other.base_tokens)
    return new if is_contained else merged.to_bytes()


@cache
def _shipped() -> tuple[Floats, Floats] | None:
    """Cells and weights of the prior that ships with the package, read once; not to be changed."""
    path = resources.files("hdserve.drafting").joinpath(PRIOR_NAME)
    if not path.is_file():
        return None
    shipped = Calibration.from_bytes(path.read_bytes())
    cells, weights = shipped.cells, shipped.weights
    np.minimum(cells[CELL_COUNT], PRIOR_COUNT, out=cells[CELL_COUNT])
    cells.flags.writeable = weights.flags.writeable = False
    return cells, weights


def _most_biased(token_bias: Floats, num: int) -> Ints:
    """The tokens with the ``num`` largest absolute biases, in order; without those equal to the
    next one."""
    sizes = np.abs(token_bias)
    tokens: Ints = np.flatnonzero(sizes >= _LEAST_BIAS)
    if len(tokens) > num:
        next_size = np.partition(sizes[tokens], -num - 1)[-num - 1]
        tokens = tokens[sizes[tokens] > next_size]
    return tokens


def _decompress(data: bytes) -> bytes:
    """Decompress with ``zlib``; a decompression bomb is refused early."""
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(data, MAX_UNPACKED_BYTES)
    if not unpacker.eof:
        raise SnapshotError("the calibration is corrupt: it ends early, or is too large")
    return found


def _sum_of(message: dict[str, Any], name: str) -> float:
    value = float(message[name])
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
    """Probabilities of the present cells before anything was learned: shares, discounted."""
    shares = np.array(_SHARES)[:, None] * np.array([0.35, 0.45, 0.6, 0.75, 0.9, 0.95])
    orders = np.array([0.4, 0.7, 0.85, 0.9, 0.95, 1.0, 1.0, 1.0])
    shape = (NUM_LEVELS, NUM_ORDERS, NUM_TOTALS, ROWS_PER_LEVEL, NUM_SHARES, NUM_RANKS)
    guess = orders[:, None, None, None, None] * shares.T[:, None, :, None]
    return np.broadcast_to(guess, shape).reshape(-1).astype(np.float32)

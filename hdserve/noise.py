"""The noise of sampled choices: a number for each seed, choice, position and token.

A token is chosen by a race (exponential race, or Gumbel-max trick: Gumbel 1954; Maddison et al.
2014): token ``i`` arrives after ``exponential(key, i) / weight_i``, and the first one is chosen, so
the probability of each is proportional to its weight.  The noise is a hash of the four numbers and
nothing else.  So a choice is the same with drafts and without, and on any replica that retries it;
and a drafter may know the noise before the model gives the weights
(``hdserve.drafting.chances``).

The functions are called from Python and compiled into kernels; integers stay below ``2**63``
except in sums and products of which only the low 32 bits are used.
"""

from __future__ import annotations

import hashlib
import math
import struct
from operator import index
from typing import Final

from numba.extending import register_jitable

WORD: Final = 0xFFFFFFFF
SPACING: Final = 0x9E3779B1
"""An odd number near ``2**32`` over the golden ratio: neighbours are spread over all words."""

FIRST_FACTOR: Final = 0x85EBCA6B
SECOND_FACTOR: Final = 0xC2B2AE35
"""The factors of the last steps of MurmurHash3 (Appleby 2011), by which each bit of a word changes
all bits of the result."""


def sequence_key(seed: int, choice_index: int) -> int:
    """The key for the noise of one choice of one request; 63 bits."""
    message = struct.pack("<QQ", index(seed) % 2**64, choice_index)
    digest = hashlib.blake2b(message, digest_size=8, person=b"hdserve-noise").digest()
    return int.from_bytes(digest, "little") >> 1


@register_jitable
def _scrambled(word: int) -> int:
    word ^= word >> 16
    word = (word * FIRST_FACTOR) & WORD
    word ^= word >> 13
    word = (word * SECOND_FACTOR) & WORD
    return word ^ (word >> 16)


@register_jitable
def position_key(key: int, position: int) -> int:
    """The key for the noise at ``position`` of a sequence; 63 bits.

    Args:
        key: from :func:`sequence_key`.
        position: how many tokens of prompt and output come before.
    """
    low = _scrambled(((key & WORD) + position * SPACING) & WORD)
    high = _scrambled(low ^ (key >> 32))
    return ((high >> 1) << 32) | low


@register_jitable
def noise_word(key: int, token_id: int) -> int:
    """32 random bits of a token.

    Args:
        key: from :func:`position_key`.
    """
    return _scrambled(_scrambled((token_id * SPACING + key) & WORD) ^ (key >> 32))


@register_jitable
def exponential(word: int) -> float:
    """An exponentially distributed number of mean 1 from 32 random bits, between 1e-10 and 23."""
    return -math.log1p(-(word + 0.5) * 2.0**-32)

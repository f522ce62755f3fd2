"""The tokens that may be chosen are read once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hdserve import core
from hdserve.core import SamplingParams
from hdserve.engine.sampling.allowed_tokens import AllowedTokens
from hdserve.errors import InvalidRequest
from tests.engine.helpers import GREEDY
from tests.engine.sampling.test_sampler import CPU
from tests.engines import make_engine, make_prompt, run
from tests.models import VOCAB_SIZE


class Unread(tuple[int, ...]):
    """Token ids that the thread of an engine does not read."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError


def test_the_engine_does_not_read_what_is_there_already() -> None:
    """Choices of one request may have most of a vocabulary together."""
    allowed = AllowedTokens((3, 7, 3), VOCAB_SIZE)
    params = SamplingParams(allowed_token_ids=Unread((3, 7)), max_tokens=4, min_tokens=1)
    sequences = [
        core.Sequence(str(index), make_prompt(5), params, allowed_tokens=allowed)
        for index in range(2)
    ]
    run(make_engine(), sequences)
    assert {*sequences[0].output_token_ids, *sequences[1].output_token_ids} <= {3, 7}


@pytest.mark.parametrize("token_ids", [(3,), np.array([0])], ids=str)
def test_what_is_not_there_the_engine_makes(token_ids: Any) -> None:
    seq = core.Sequence("r", make_prompt(5), SamplingParams(allowed_token_ids=token_ids, **GREEDY))
    run(make_engine(), [seq])
    assert {*seq.output_token_ids} == {*token_ids}


def test_all_of_them_may_be_among_others() -> None:
    allowed = AllowedTokens((3, 7, 3), VOCAB_SIZE)
    assert allowed.are_among({3, 5, 7, VOCAB_SIZE})
    assert not allowed.are_among({3, 5})
    assert not allowed.are_among(())
    assert allowed.bias(CPU).isfinite().nonzero().flatten().tolist() == [3, 7]


def test_tokens_of_no_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="allowed_token_ids: the token id -1") as caught:
        AllowedTokens((1, -1), VOCAB_SIZE)
    assert caught.value.param == "allowed_token_ids"

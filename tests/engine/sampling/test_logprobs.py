"""Log probabilities of tokens are those of the raw logits, by one definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hdserve.core import TokenLogprob
from hdserve.engine.sampling.logprobs import chosen_logprobs, token_logprobs
from tests.engine.reads import Reads


def token_logprob(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """That of one row."""
    (found,) = chosen_logprobs(logits[None], [token_id], num_top)
    return found


def by_definition(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """One number after the other."""
    row = logits.double().masked_fill(logits.isnan(), -torch.inf).log_softmax(dim=-1)
    ranked = sorted((-value, token) for token, value in enumerate(row.tolist()))[:num_top]
    top = tuple((token, -negative) for negative, token in ranked)
    return TokenLogprob(token_id, float(row[token_id]), top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [3, 61, 1000, 40_000])
def test_rows_together_are_those_by_definition(vocab_size: int, dtype: torch.dtype) -> None:
    """To the last bit, whatever is beside a row: with many equals, with a few numbers alone, with
    all equal, and with some, or all, that differ too little to be more or less likely."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 4.0 * torch.randn((9, vocab_size), generator=generator)
    logits[1] = logits[1].round()
    logits[2, 2:] = -torch.inf
    logits[3] = 1.0
    logits[4, ::3] = torch.nan
    logits[5] = 1e-30 * torch.arange(vocab_size)
    logits[6] -= 40.0
    logits[6, 10:40] = 1e-30 * torch.arange(vocab_size)[10:40]
    logits = logits.to(dtype)
    tokens = torch.randint(vocab_size, (9,), generator=generator).tolist()
    for num_top in (0, 1, 5, 20):
        found = chosen_logprobs(logits, tokens, num_top)
        assert found == [
            by_definition(row, token, num_top) for row, token in zip(logits, tokens, strict=True)
        ]


def test_numbers_are_not_read_one_by_one() -> None:
    """However many rows and alternatives there are: each would wait for a GPU."""
    logits = torch.randn((6, 5000), generator=torch.Generator().manual_seed(1))
    with Reads() as reads:
        chosen_logprobs(logits, range(6), 20)
    assert reads.number == 0


class Operators(TorchDispatchMode):
    """Notes the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_alternatives_are_not_looked_for_among_doubles() -> None:
    """Among the logits a kernel finds them in a fraction of the time."""
    logits = torch.randn((2, 5000), generator=torch.Generator().manual_seed(1))
    with Operators() as operators:
        chosen_logprobs(logits, [3, 5], 20)
    assert "_log_softmax" in operators.names
    assert "topk" not in operators.names


def test_a_row_may_round_otherwise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; there are as many alternatives as were asked for."""

    def rounded(logits: torch.Tensor) -> torch.Tensor:
        found = logits.double().log_softmax(dim=-1)
        return found if logits.ndim == 2 else torch.nextafter(found, torch.tensor(-math.inf))

    monkeypatch.setattr("hdserve.engine.sampling.logprobs._float64_logprobs", rounded)
    (found,) = chosen_logprobs(torch.zeros((1, 500)), [3], 20)
    assert [token for token, _ in found.top] == [*range(20)]


def test_nothing_to_score() -> None:
    assert chosen_logprobs(torch.zeros((0, 7)), [], 3) == []


@pytest.mark.parametrize("num_top", [0, 1, 4, 5])
def test_logprobs_are_of_the_raw_logits(num_top: int) -> None:
    """A token's log probability and the likeliest tokens, ties by id, from the definition."""
    logits = torch.tensor([0.5, 2.0, -1.0, 2.0, 0.5])
    found = token_logprob(logits, 2, num_top)
    total = math.log(sum(math.exp(value) for value in logits.tolist()))
    assert found.token_id == 2
    assert found.logprob == pytest.approx(-1.0 - total)
    assert [token for token, _ in found.top] == [1, 3, 0, 4, 2][:num_top]
    for token, value in found.top:
        assert value == pytest.approx(float(logits[token]) - total)


def test_more_alternatives_than_tokens() -> None:
    """A vocabulary smaller than the number of alternatives gives them all."""
    assert len(token_logprob(torch.zeros(3), 1, 20).top) == 3


def test_ranks_of_equals_are_those_of_their_order() -> None:
    """The likeliest come in the order of their ids, and a token that is not among them has a rank
    behind them."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]]).expand(5, 5).contiguous()
    found = [*token_logprobs(logits, range(5), 2)]
    assert [score.rank for score in found] == [5, 2, 4, 2, 4]
    assert [[token for token, _ in score.top] for score in found] == [[1, 3]] * 5


def test_rows_are_scored_as_one_by_one() -> None:
    """Prompts and answers have log probabilities by the same definition."""
    logits = torch.randn((5, 40), generator=torch.Generator().manual_seed(3)) * 9
    for num_top in (0, 1, 20):
        for row, found in zip(logits, token_logprobs(logits, range(5), num_top), strict=True):
            wanted = token_logprob(row, found.token_id, num_top)
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
            assert [v for _, v in found.top] == pytest.approx([v for _, v in wanted.top], abs=1e-5)


def test_what_is_no_number_is_the_least_likely() -> None:
    """It is not chosen, and takes nothing from the probabilities of the others."""
    logits = torch.tensor([[1.0, torch.nan, 3.0, 2.0]])
    numbers = torch.tensor([[1.0, -torch.inf, 3.0, 2.0]])
    for row, clean in zip(logits, numbers, strict=True):
        assert token_logprob(row, 2, 4) == token_logprob(clean, 2, 4)
    for token_id in range(4):
        (found,) = token_logprobs(logits, [token_id], 4)
        assert [found] == [*token_logprobs(numbers, [token_id], 4)]
        assert found.rank == {0: 3, 1: 4, 2: 1, 3: 2}[token_id]

"""Batches that are measured begin and end somewhere in their answers."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from hdserve.bench.steady_batch import SteadyBatch
from hdserve.config import ModelConfig
from hdserve.core import SamplingParams, Sequence
from hdserve.engine.engine import Engine
from hdserve.engine.host import ModelHost
from hdserve.errors import HdserveError

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def engine() -> Engine:
    """One that decodes plainly, a token of each sequence in a step."""
    return make(4096)


def make(num_rows: int) -> Engine:
    config = {
        "name": "m",
        "model": "hdserve-mini",
        "engine": {"compile": False, "kv_cache_tokens": num_rows, "prefix_caching": False},
    }
    return ModelHost(ModelConfig.model_validate(config)).make_engine(is_drafting=False)


class Begun:
    """Adds sequences, and keeps what was asked for."""

    def __init__(self, engine: Engine, stop: Any = ()) -> None:
        self.shares: list[float] = []
        self._engine = engine
        self._stop = stop

    def __call__(self, number: int, share: float) -> Sequence:
        assert number == len(self.shares)
        self.shares.append(share)
        params = SamplingParams(
            temperature=0, max_tokens=round(share * NUM_TOKENS), ignore_eos=True
        )
        object.__setattr__(params, "stop", self._stop)
        seq = Sequence(f"{id(self)}/{number}", [7, 8, 9], params)
        self._engine.add(seq)
        return seq


def test_slots_are_led_to_different_parts_of_their_answers(engine: Engine) -> None:
    """Once the engine has measured how long so many sequences decode, which holds prompts back."""
    for _ in range(2):
        with closing(SteadyBatch(engine, 4, Begun(engine))) as batch:
            batch.lead_in()
    begun = Begun(engine)
    with closing(SteadyBatch(engine, 4, begun)) as batch:
        batch.lead_in()
        assert batch.num_tokens == 0
        assert sum(seq.counts.num_steps for seq in batch.sequences) == 0
        assert [len(seq.output_token_ids) for seq in batch.sequences] == [9, 6, 3]
        assert batch.num_begun == 6
    assert begun.shares[:3] == [0.25, 0.5, 0.75]
    assert set(begun.shares[3:]) == {1.0}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_answers", [4, 5])
def test_as_many_prompts_begin_as_answers_are_decoded(
    engine: Engine, size: int, num_answers: int
) -> None:
    """Whatever the size: what goes through the model for a token does not depend on it."""
    with closing(SteadyBatch(engine, size, Begun(engine))) as batch:
        batch.lead_in()
        num_before = batch.num_begun
        batch.decode(num_answers * NUM_TOKENS, 60.0)
        assert batch.num_begun - num_before == pytest.approx(num_answers, abs=1)
        assert sum(seq.counts.num_steps for seq in batch.sequences) == batch.num_tokens
    assert not engine.has_work


def test_one_sequence_needs_no_leading_in(engine: Engine) -> None:
    begun = Begun(engine)
    with closing(SteadyBatch(engine, 1, begun)) as batch:
        batch.lead_in()
        assert not begun.shares
        batch.decode(NUM_TOKENS, 60.0)
        assert begun.shares == [1.0]


@pytest.mark.parametrize(("num_rows", "most_waiting"), [(64, 2), (256, 0)])
def test_sequences_without_room_are_counted(num_rows: int, most_waiting: int) -> None:
    """Each takes 32 rows, and four are to be decoded together."""
    small = make(num_rows)
    with closing(SteadyBatch(small, 4, Begun(small))) as batch:
        batch.decode(NUM_TOKENS, 60.0)
        assert batch.most_waiting == most_waiting


def test_a_sequence_that_fails_ends_the_measurement(engine: Engine) -> None:
    """It would start again and again, for tokens that never come."""
    begun = Begun(engine, stop=(("a",),))
    with closing(SteadyBatch(engine, 2, begun)) as batch, pytest.raises(HdserveError):
        batch.decode(NUM_TOKENS, 1.0)
    assert not engine.has_work

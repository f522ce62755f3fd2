"""What is measured is measured with all its drafters."""

from __future__ import annotations

import pytest

from hdserve import core
from hdserve.bench.checked_step import checked_step
from hdserve.drafting.base import Drafter
from hdserve.errors import HdserveError
from hdserve.tree import DraftTree
from tests.engines import make_engine, make_prompt, make_sequence


class Broken(Drafter):
    name = "broken"

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        raise ZeroDivisionError


def test_a_drafter_that_fails_is_named() -> None:
    engine = make_engine([Broken()])
    engine.add(make_sequence("0", make_prompt(5)))
    with pytest.raises(HdserveError, match="'broken' failed in propose"):
        checked_step(engine)

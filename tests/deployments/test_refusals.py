"""A model that is full is not asked again at once."""

from __future__ import annotations

import pytest

from deployments.refusals import Refusals
from hdserve.errors import GrammarsOverloaded, Overloaded


def test_what_was_refused_is_refused() -> None:
    """And what is larger; of this model, while it is remembered."""
    refusals = Refusals(remembered_s=1e6)
    refusals.check("m", 4)
    refusals.note("m", 4, Overloaded())
    for num_sequences in (4, 5):
        with pytest.raises(Overloaded):
            refusals.check("m", num_sequences)
    refusals.check("m", 3)
    refusals.check("other", 4)
    forgetful = Refusals(remembered_s=0)
    forgetful.note("m", 4, Overloaded())
    forgetful.check("m", 4)


def test_a_refusal_for_a_new_grammar_is_not_remembered() -> None:
    """Others have room."""
    refusals = Refusals(remembered_s=1e6)
    refusals.note("m", 1, GrammarsOverloaded("many bring one"))
    refusals.check("m", 1)

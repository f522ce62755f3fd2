"""The plan of the step that is running, for code inside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from hdserve.engine.batch.step_plan import StepPlan

_PLAN: Final[ContextVar[StepPlan | None]] = ContextVar("hdserve_plan", default=None)


@contextmanager
def running(plan: StepPlan) -> Iterator[None]:
    """Within the block, forwards of this thread belong to the step of ``plan``."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


def current_plan() -> StepPlan | None:
    """The plan of the step that this thread is running; ``None`` outside a step."""
    return _PLAN.get()

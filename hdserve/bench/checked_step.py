"""Steps of an engine whose failures are the caller's."""

from __future__ import annotations

from hdserve.core import StepOutput
from hdserve.engine.engine import Engine


def checked_step(engine: Engine) -> list[StepOutput]:
    """Take one step.

    Raises:
        HdserveError: a sequence failed in it.
    """
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs

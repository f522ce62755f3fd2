"""Steps of an engine whose failures, and those of its drafters, are the caller's."""

from __future__ import annotations

from hdserve.core import StepOutput
from hdserve.engine.engine import Engine
from hdserve.errors import HdserveError


def checked_step(engine: Engine) -> list[StepOutput]:
    """Take one step.

    Raises:
        HdserveError: a sequence failed in it; or a drafter in any call so far, without which
            the engine goes on, so that something else would be measured.
    """
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise output.error
    for name, call in engine.drafters.num_failures:
        raise HdserveError(f"the drafter {name!r} failed in {call}; the log says why")
    return outputs

"""What ``hdserve serve`` says in its last line of an application that does not start."""

from __future__ import annotations

import traceback

import pytest
from ray.exceptions import RayTaskError

from deployments.runner import _reason
from hdserve.errors import ConfigError

LINES = "cannot load the model 'a/b':\nYou are trying to access a gated repo.\n  A directory does."


def message_of_ray(error: Exception) -> str:
    """As Ray Serve has it of a replica whose constructor fails: Ray leaves out the beginnings of
    all tracebacks but the first."""
    try:
        try:
            try:
                raise error.__cause__ or error
            except Exception:
                raise error from error.__cause__
        except Exception:
            raise RuntimeError(traceback.format_exc()) from None
    except RuntimeError as told:
        failed = RayTaskError("f", traceback.format_exc(), told, proctitle="ray::f", pid=1, ip="")
        return f"The deployment failed to start 3 times. Error:\n{failed.as_instanceof_cause()}"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigError("there is no such directory"), "there is no such directory"),
        (ConfigError(LINES), " ".join(LINES.split())),
        (ValueError("of\nsomebody else"), "somebody else"),
    ],
)
def test_errors_of_ours_are_told_as_a_whole(error: Exception, reason: str) -> None:
    assert _reason(message_of_ray(error)) == reason


def test_an_error_that_came_of_ours_is_the_one_that_is_told() -> None:
    error = ValueError("afterwards")
    error.__cause__ = ConfigError(LINES)
    assert _reason(message_of_ray(error)) == "ValueError: afterwards"
    error = ConfigError("so it is\nwrong")
    error.__cause__ = ConfigError(LINES)
    assert _reason(message_of_ray(error)) == "so it is wrong"

"""What a check of ``hdserve doctor`` finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad it is: a warning costs speed or comfort, a failure keeps it from serving."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        remedy: a command, or a line of the configuration (of the model, where the subject names
            one), that mends it; behind `  # ` what else would.  Empty when all is well.
    """

    subject: str
    verdict: Verdict
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    """Return the finding that all is well."""
    return Finding(subject, Verdict.OK, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding that costs speed or comfort."""
    return Finding(subject, Verdict.WARNING, text, remedy)


def failure(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding that keeps hdserve from serving."""
    return Finding(subject, Verdict.FAILURE, text, remedy)

"""What a check of ``hdserve doctor`` finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad it is: a warning costs speed or comfort, a failure prevents serving."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        remedy: a command, or a line of the configuration (of the model, if the subject names one),
            that fixes it; alternatives follow after `  # `.  Empty when all is well.
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
    """Return a finding that prevents serving."""
    return Finding(subject, Verdict.FAILURE, text, remedy)

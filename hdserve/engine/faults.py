"""Failures that end one sequence and leave the others alone."""

from __future__ import annotations

FAULTS_OF_ONE_REQUEST = (ArithmeticError, TypeError, ValueError)
"""Errors that a request's values can cause in code that sees only this request.  Any other error,
such as a failed assertion or one that torch raises, may mean that the state of all requests is
broken."""


class SequenceFault(Exception):
    """A sequence cannot be decoded because of a value of its request; others are not affected."""


class NoToken(SequenceFault):
    """No token can be chosen at a node: its logits are not finite, or its grammar allows only
    tokens that the model lacks.  Nothing has changed."""

    def __init__(self) -> None:
        super().__init__("no token can be chosen: none that is allowed has a finite logit")

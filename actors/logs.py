"""Where lines of this program's log go in the processes of Ray, which look after Ray's own alone:
of others Python prints warnings, with neither time nor level, and nothing below them."""

from __future__ import annotations

import logging

PACKAGES = ("hdserve", "actors", "deployments")

_SERVE_LOGGER = "ray.serve"
_FORMAT = "%(levelname)s %(asctime)s %(name)s -- %(message)s"
"""As Ray Serve has it, but for the name of the replica."""


class _ServeLog(logging.Handler):
    """Hands lines to the logger of Ray Serve.  The level, the handlers and with them the form are
    those it has at that moment: another ``logging_config`` changes them in a running replica."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger(_SERVE_LOGGER)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def log_with_serve() -> None:
    """Have this process, a replica of Ray Serve, log where and as Ray Serve does."""
    _log_with(_ServeLog(), logging.DEBUG)


def log_to_stderr() -> None:
    """Have this process, an actor, log to its standard error, of which Ray makes a file."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    _log_with(handler, logging.INFO)


def _log_with(handler: logging.Handler, level: int) -> None:
    """Have ``handler``, and no other, take the lines of this program."""
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False

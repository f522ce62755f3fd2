"""Where this program's log goes in processes of Ray.  Ray only sets up logging for itself; of other
loggers Python prints warnings, without time or level, and nothing below."""

from __future__ import annotations

import logging

from hdserve.shadows import PACKAGES

_SERVE_LOGGER = "ray.serve"
_TRACING = "opentelemetry"
_FORMAT = "%(levelname)s %(asctime)s %(name)s -- %(message)s"
"""The format of Ray Serve, without the name of the replica."""


class _ServeLog(logging.Handler):
    """Passes records on to Ray Serve's log, with the level, handlers and format of that moment:
    another ``logging_config`` changes them in a running replica."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger(_SERVE_LOGGER)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def log_with_serve() -> None:
    """Make this process, a replica of Ray Serve, log where and as Ray Serve does."""
    _log_with(_ServeLog(), logging.DEBUG)


def log_tracing_with_serve() -> None:
    """Make what sends traces log as Ray Serve does, too: it says when some are lost.  Warnings of
    malformed headers are left out: they quote what clients sent."""
    _log_with(_ServeLog(), logging.WARNING, (_TRACING,))
    logging.getLogger(f"{_TRACING}.trace").setLevel(logging.ERROR)


def log_to_stderr() -> None:
    """Make this process, an actor, log to its standard error, which Ray writes to a file."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    _log_with(handler, logging.INFO)


def _log_with(handler: logging.Handler, level: int, packages: tuple[str, ...] = PACKAGES) -> None:
    """Make ``handler``, and no other, handle the log records of ``packages``."""
    for name in packages:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False

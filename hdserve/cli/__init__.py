"""The ``hdserve`` command.  Its imports happen while it runs, so that Ctrl-C ends it quietly during
them too."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command; a user's error is one line on standard error and exit status 2, an
    interruption exit status ``EXIT_INTERRUPTED``."""
    try:
        from hdserve.cli.commands import run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)

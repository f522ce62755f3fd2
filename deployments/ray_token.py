"""The file of the token with which Ray lets in whoever may run code on a cluster."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def close_token() -> None:
    """Take all rights to the token from other users: to its file, or, if there is none yet, to the
    directory in which Ray will create one that everybody may read.

    What does not belong to this user, or cannot be changed, stays as it is.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: nobody knows the home directory
        token = Path.home() / ".ray" / "auth_token"
        token.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = token if token.exists() else token.parent
        found = place.stat()
        if found.st_uid == os.geteuid():
            place.chmod(found.st_mode & 0o7700)

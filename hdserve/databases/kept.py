"""Whether a server would keep what a command is about to add to its database."""

from __future__ import annotations

from collections.abc import Mapping

from hdserve.databases.output_log import OutputLog
from hdserve.errors import DatabaseError


def check_kept(
    log: OutputLog, new_bytes: Mapping[str, int], max_bytes: int, max_total_bytes: int
) -> None:
    """
    Args:
        new_bytes: of the outputs that would be added to ``log``, by namespace.
        max_bytes, max_total_bytes: of a namespace, and of all, as the server has them that is to
            read the database.

    Raises:
        DatabaseError: the server would forget the oldest.
    """
    for namespace, num_new in new_bytes.items():
        num_bytes = log.peek(namespace).num_bytes
        _check_size(f"namespace {namespace}", num_bytes, num_new, "max_bytes", max_bytes)
    num_new = sum(new_bytes.values())
    _check_size("all namespaces", log.num_bytes, num_new, "max_total_bytes", max_total_bytes)


def _check_size(whose: str, num_bytes: int, num_new: int, name: str, most: int) -> None:
    if num_new and num_bytes + num_new > most:
        raise DatabaseError(
            f"{whose} would have {num_bytes + num_new:,} bytes, and a server would forget the "
            f"oldest: `model_database.{name}` is {most:,}; --config says whose that is"
        )

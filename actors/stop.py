"""Ending the detached actors."""

from __future__ import annotations

from typing import Any, NamedTuple

import ray
from ray._private.services import find_gcs_addresses
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors import detached
from actors.model_database import model_of
from hdserve.cluster_address import TOKEN_HINT, why_unanswered
from hdserve.errors import DatabaseError

_CLOSE_TIMEOUT_S = 30.0


class Stopped(NamedTuple):
    """What was ended of a cluster.

    Attributes:
        address: of the cluster.
        names: of the actors that were ended.
        kept: why each of the others was not.
    """

    address: str
    names: list[str]
    kept: dict[str, str]


def stop_actors(
    address: str | None = None, model: str | None = None, *, is_forced: bool = False
) -> Stopped:
    """End the databases' actors of a cluster, after they have written everything.

    One that cannot, or does not answer, is not ended.

    Args:
        address: of the cluster; default: the one that runs on this machine.
        model: only the database of this model; default: all models, and the statistics.
        is_forced: end all the same those that hold text that is nowhere else.

    Raises:
        DatabaseError: there is no cluster to reach, or several run on this machine and none is
            named.
    """
    is_ours = not ray.is_initialized()
    if is_ours:
        if address in (None, "auto"):
            _check_is_one()
        else:
            _check_answers(address)
        try:
            ray.init(address or "auto", log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise _not_reached(address, f"{error}; {TOKEN_HINT}") from error
        except (ValueError, RayError) as error:
            raise _not_reached(address, error) from error
    try:
        names = [name for name in detached.names() if model in (None, model_of(name))]
        kept = _stop_all(names, is_forced)
        ended = [name for name in names if name not in kept]
        return Stopped(ray.get_runtime_context().gcs_address, ended, kept)
    finally:
        if is_ours:
            ray.shutdown()


def _check_is_one() -> None:
    """
    Raises:
        DatabaseError: several clusters run on this machine.
    """
    found = sorted(find_gcs_addresses())  # type: ignore[no-untyped-call]
    if len(found) > 1:
        addresses = ", ".join(found)
        raise DatabaseError(
            f"{len(found)} Ray clusters run on this machine: {addresses}; choose one with --address"
        )


def _check_answers(address: str) -> None:
    """Check that something listens there; Ray would wait minutes for it.

    Raises:
        DatabaseError: nothing does.
    """
    if reason := why_unanswered(address):
        raise _not_reached(address, reason)


def _not_reached(address: str | None, reason: object) -> DatabaseError:
    where = f" at {address}" if address else ""
    return DatabaseError(f"no Ray cluster is reached{where}: {reason}")


def _stop_all(names: list[str], is_forced: bool) -> dict[str, str]:
    """End actors; return why each of the others was not ended.

    One that waits for the directory of another is asked again when that has ended.
    """
    kept = dict.fromkeys(names, "")
    while True:
        num_before = len(kept)
        reasons = {name: _stop(name, is_forced) for name in kept}
        kept = {name: reason for name, reason in reasons.items() if reason is not None}
        if len(kept) in (0, num_before):
            return kept


def _stop(name: str, is_forced: bool) -> str | None:
    """End an actor; return why it was not ended, if it was not."""
    try:
        actor = detached.get(name)
    except ValueError:  # it has ended meanwhile
        return None
    reason = None if model_of(name) is None else _why_unwritten(actor)
    if reason is not None and not is_forced:
        return reason
    ray.kill(actor)
    return None


def _why_unwritten(actor: Any) -> str | None:
    """Have a model database written; return why something is only in memory, if it is, or may
    be."""
    try:
        answer = actor.close.remote()
        reason: str | None = ray.get(answer, timeout=_CLOSE_TIMEOUT_S)
    except GetTimeoutError:
        ray.cancel(answer)  # else it would release the directory of an actor that lives on
        return f"it did not answer within {_CLOSE_TIMEOUT_S:g} s"
    except RayError as error:
        return repr(error.cause if isinstance(error, RayTaskError) else error)
    return reason

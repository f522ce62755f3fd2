"""Ending the detached actors."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import ray
from ray._private.services import find_gcs_addresses
from ray.exceptions import RayError

from actors import detached
from actors.model_database import model_of
from hdserve.cluster_address import TOKEN_HINT, why_unanswered
from hdserve.errors import DatabaseError

_CLOSE_TIMEOUT_S = 30.0


class Stopped(NamedTuple):
    """The names of the actors that were ended, and the address of their cluster."""

    address: str
    names: list[str]


def stop_actors(address: str | None = None, model: str | None = None) -> Stopped:
    """End the databases' actors of a cluster, after they have written everything.

    Args:
        address: of the cluster; default: the one that runs on this machine.
        model: only the database of this model; default: all models, and the statistics.

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
        for name in names:
            _stop(name)
        return Stopped(ray.get_runtime_context().gcs_address, names)
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


def _stop(name: str) -> None:
    with contextlib.suppress(ValueError):  # it has ended meanwhile
        actor = detached.get(name)
        if model_of(name) is not None:
            with contextlib.suppress(RayError):
                ray.get(actor.close.remote(), timeout=_CLOSE_TIMEOUT_S)
        ray.kill(actor)

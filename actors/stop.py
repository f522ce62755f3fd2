"""Ending the detached actors, which outlive the application on purpose."""

from __future__ import annotations

import contextlib

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from actors.model_database import RAY_NAMESPACE
from hdserve.errors import DatabaseError

_CLOSE_TIMEOUT_S = 30.0
_MODEL_DATABASE = "model-database-"


def stop_actors(address: str | None = None, model: str | None = None) -> list[str]:
    """End the databases' actors of a cluster, after they have written what they hold.

    Args:
        address: of the cluster; default: as Ray finds it (``RAY_ADDRESS``, or this machine's).
        model: only the database of this model; default: those of all models, and the statistics.

    Returns:
        The names of what was ended.

    Raises:
        DatabaseError: there is no cluster to reach.
    """
    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            ray.init(address or "auto", log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise DatabaseError(f"no Ray cluster is reached: {error}") from error
    try:
        names = [
            actor["name"]
            for actor in list_named_actors(all_namespaces=True)
            if actor["namespace"] == RAY_NAMESPACE and _is_meant(actor["name"], model)
        ]
        for name in names:
            _stop(name)
        return names
    finally:
        if is_ours:
            ray.shutdown()


def _is_meant(name: str, model: str | None) -> bool:
    if model is None:
        return True
    return name.startswith(_MODEL_DATABASE) and name.split(":", 1)[1].rsplit(":", 1)[0] == model


def _stop(name: str) -> None:
    with contextlib.suppress(ValueError):  # it has ended since
        actor = ray.get_actor(name, namespace=RAY_NAMESPACE)
        if name.startswith(_MODEL_DATABASE):
            with contextlib.suppress(RayError):
                ray.get(actor.close.remote(), timeout=_CLOSE_TIMEOUT_S)
        ray.kill(actor)

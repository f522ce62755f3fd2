"""Actors that outlive the application on purpose, by name, in a Ray namespace of their own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ray
from ray.util import list_named_actors

from actors.logs import log_to_stderr

_NAMESPACE = "hdserve"


def get_or_create(
    actor: type,
    name: str,
    num_cpus: float,
    resources: Mapping[str, float],
    *args: Any,
    concurrency_groups: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """A handle of the actor called ``name``, which is started if there is none in the cluster.

    Ray starts it again without limit.  Calls that it does not answer are not repeated.

    Args:
        resources: custom ones that it reserves.
        args: what a new one is made of; one that is there keeps what it was made of.
        concurrency_groups: threads of those of its methods that name a group; all others share one.

    Raises:
        RayError: the cluster cannot be reached.
    """
    remote: Any = ray.remote  # whose types lack the groups
    options = remote(concurrency_groups=dict(concurrency_groups))(_logging(actor)).options(
        name=name,
        namespace=_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=num_cpus,
        resources=dict(resources),
    )
    return options.remote(*args)


def _logging(actor: type) -> type:
    """Return ``actor`` with a log; by itself it is a plain class, which changes no process."""

    class Logging(actor):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            log_to_stderr()
            super().__init__(*args)

    Logging.__name__ = Logging.__qualname__ = actor.__name__  # by which Ray shows it
    return Logging


def get(name: str) -> Any:
    """A handle of the actor called ``name``.

    Raises:
        ValueError: there is none.
    """
    return ray.get_actor(name, namespace=_NAMESPACE)


def names() -> list[str]:
    """The names of all that there are."""
    found = list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in found if actor["namespace"] == _NAMESPACE]

"""Actors that deliberately outlive the application, found by name, in their own Ray namespace."""

from __future__ import annotations

import contextlib
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

    Ray restarts it without limit.  Calls that it does not answer are not repeated.  They may be
    carried out in another order: in order, Ray waits for calls that were withdrawn before the actor
    was there.

    Args:
        resources: custom resources that it reserves.
        args: passed to the constructor of a new one; an existing one keeps its own.
        concurrency_groups: threads of each named group of methods; all others share one thread.

    Raises:
        RayError: the cluster cannot be reached.
    """
    with contextlib.suppress(ValueError):  # Ray keeps each class that is made for a new one
        return get(name)
    remote: Any = ray.remote  # its type hints lack the groups
    options = remote(concurrency_groups=dict(concurrency_groups))(_logging(actor)).options(
        name=name,
        namespace=_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        allow_out_of_order_execution=True,
        num_cpus=num_cpus,
        resources=dict(resources),
    )
    return options.remote(*args)


def _logging(actor: type) -> type:
    """Return ``actor`` with logging; by itself it is a plain class that changes no process."""

    class Logging(actor):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            log_to_stderr()
            super().__init__(*args)

    Logging.__name__ = Logging.__qualname__ = actor.__name__  # the name Ray shows
    return Logging


def get(name: str) -> Any:
    """A handle of the actor called ``name``.

    Raises:
        ValueError: there is none.
    """
    return ray.get_actor(name, namespace=_NAMESPACE)


def names() -> list[str]:
    """The names of all existing ones."""
    found = list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in found if actor["namespace"] == _NAMESPACE]

"""Which processes of a configuration Ray can place on nodes with given free resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hdserve.config import ModelConfig, ServeConfig

Resources = Mapping[str, float]
"""Amounts by Ray's names of resources: ``CPU``, ``GPU`` and those of the
administrator."""

STATISTICS_CPUS = 0.1
"""What the actor of the statistics databases reserves."""

_PARTS = 10_000
"""Ray counts in ten-thousandths, so that fractions add up."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that the application starts.

    Attributes:
        owner: the model, or another part that it belongs to.
        resources: what it reserves.
    """

    owner: str
    resources: Resources
    model: ModelConfig | None = field(default=None, repr=False)


def processes(config: ServeConfig) -> Iterator[Process]:
    """Yield all processes that exist at first; those that every model needs to answer come
    first."""
    yield from _of_no_model(config)
    for model in config.models:
        yield from [replica(model)] * model.first_num_replicas


def fewest_processes(config: ServeConfig) -> Iterator[Process]:
    """Yield the processes that exist even while nothing is asked."""
    yield from _of_no_model(config)
    for model in config.models:
        yield from [replica(model)] * model.min_num_replicas


def replica(model: ModelConfig) -> Process:
    """Return a process that serves the model."""
    wanted = {"CPU": model.num_cpus, "GPU": model.num_gpus or 0, **model.resources}
    return Process(model.name, wanted, model)


def _of_no_model(config: ServeConfig) -> Iterator[Process]:
    database, gateway = config.model_database, config.gateway
    yield Process("the statistics database", {"CPU": STATISTICS_CPUS, **database.resources})
    if database.is_enabled:
        for _ in range(database.num_shards * len(config.models)):
            yield Process("the model databases", {"CPU": database.num_cpus, **database.resources})
    for _ in range(gateway.num_replicas):
        yield Process("the gateway", {"CPU": gateway.num_cpus, **gateway.resources})


class _Node:
    """What is left of a node.  Parts of different GPUs do not add up to a whole one.

    Args:
        free: for partly free GPUs Ray only reports the node's total, which is taken to be on as few
            GPUs as possible.
    """

    def __init__(self, free: Resources) -> None:
        self._parts = _parts(free)
        num_whole, rest = divmod(self._parts.pop("GPU", 0), _PARTS)
        self._gpus = [_PARTS] * num_whole + [rest] * (rest > 0)

    @property
    def size(self) -> tuple[int, int]:
        """The parts of GPUs and of CPUs that are left, by which nodes are compared."""
        return sum(self._gpus), self._parts["CPU"]

    def has(self, needed: Counter[str]) -> bool:
        """Return whether this much is free, as counted by :func:`_parts`."""
        has_others = all(self._parts[name] >= needed[name] for name in needed if name != "GPU")
        return has_others and len(self._gpus_for(needed["GPU"])) * _PARTS >= needed["GPU"]

    def take(self, needed: Counter[str]) -> None:
        """Reserve what :meth:`has` confirmed."""
        wanted = needed["GPU"]
        for index in self._gpus_for(wanted):
            self._gpus[index] -= min(wanted, _PARTS)
        self._parts.subtract({name: number for name, number in needed.items() if name != "GPU"})

    def _gpus_for(self, wanted: int) -> list[int]:
        """Return the indices of whole GPUs, or of the one GPU that keeps the least after a part is
        taken; fewer than needed if there are not enough."""
        each = min(wanted, _PARTS)
        fitting = [index for index, left in enumerate(self._gpus) if left >= each > 0]
        fitting.sort(key=self._gpus.__getitem__)
        return fitting[: -(-wanted // _PARTS)]


def unplaced(wanted: Iterable[Process], nodes: Iterable[Resources]) -> list[Process]:
    """Return the processes for which no node has enough left.

    Processes that belong to no model are placed first, then the largest models; each on the node
    that keeps the least afterwards.

    Args:
        nodes: the free resources of each.
    """
    left = [_Node(node) for node in nodes]
    found = []
    for process in sorted(wanted, key=_rank):
        needed = _parts(process.resources)
        fitting = [node for node in left if node.has(needed)]
        if fitting:
            min(fitting, key=lambda node: node.size).take(needed)
        else:
            found.append(process)
    return found


def total(resources: Iterable[Resources], name: str) -> float:
    """Return the sum of one resource, as Ray adds it up."""
    return sum(_parts(item)[name] for item in resources) / _PARTS


def missing(process: Process, nodes: Sequence[Resources]) -> list[str]:
    """Return the resources of which no node has as much free as ``process`` alone needs."""
    needed = _parts(process.resources)
    return [
        name
        for name, number in needed.items()
        if all(_parts(node)[name] < number for node in nodes)
    ]


def _rank(process: Process) -> tuple[bool, float, int, float]:
    needed = process.resources
    is_of_model = process.model is not None
    return is_of_model, -needed.get("GPU", 0), -len(needed), -needed.get("CPU", 0)


def _parts(resources: Resources) -> Counter[str]:
    return Counter({name: round(number * _PARTS) for name, number in resources.items() if number})

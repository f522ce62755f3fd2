"""Whether the processes of a configuration can be placed, and what would help."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from hdserve.config import ServeConfig
from hdserve.doctor.cluster import Cluster
from hdserve.doctor.finding import Finding, failure, ok, warning
from hdserve.doctor.gpus import gpu_share
from hdserve.doctor.placement import (
    Process,
    Resources,
    fewest_processes,
    missing,
    processes,
    replica,
    total,
    unplaced,
)

_SECTIONS = {"the gateway": "gateway", "the model databases": "model_database"}
"""The section of the configuration by owner of processes; a model's are set in its own
entry."""


def compare_with_cluster(config: ServeConfig, cluster: Cluster) -> Iterator[Finding]:
    """Compare with the free resources of a Ray cluster's nodes; if the application is already
    there, report what Ray Serve says of it."""
    if cluster.deployed is None:
        yield from compare_resources(config, cluster.free, "the cluster", may_grow=True)
        return
    for name, message in cluster.deployed.items():
        yield warning("resources", f"{name}: {message}", "serve status  # and the logs it names")
    if not cluster.deployed:
        yield ok("resources", "the application that is deployed has what it reserves")


def compare_resources(
    config: ServeConfig, nodes: Sequence[Resources], where: str, *, may_grow: bool = False
) -> Iterator[Finding]:
    """Report the processes of the configuration that cannot be placed: of those that exist at
    first, and of models that sleep then, one model at a time, as these may take turns.

    Args:
        nodes: the free resources of each.
        where: describes whose nodes they are.
        may_grow: nodes may be added, so it is not a failure.
    """
    make = warning if may_grow else failure
    wanted = [*processes(config)]
    homeless = Counter(process.owner for process in unplaced(wanted, nodes))
    if not homeless:
        yield ok("resources", f"{_sums(wanted, nodes)} of {where} are reserved")
    for owner, number in homeless.items():
        yield make(f"{owner}: resources", *_shortage(owner, number, wanted, nodes, where))
    fewest = [*fewest_processes(config)]
    num_homeless = len(unplaced(fewest, nodes))
    for model in config.models:
        woken = [*fewest, replica(model)]
        if not model.first_num_replicas and len(unplaced(woken, nodes)) > num_homeless:
            text, remedy = _shortage(model.name, 1, woken, nodes, where)
            yield make(f"{model.name}: resources", f"when it wakes, {text}", remedy)


def _shortage(
    owner: str, number: int, wanted: Sequence[Process], nodes: Sequence[Resources], where: str
) -> tuple[str, str]:
    """Return that so many processes of ``owner`` cannot be placed among ``wanted``, and what would
    help."""
    own = [process for process in wanted if process.owner == owner]
    others = [process for process in wanted if process.owner != owner]
    each = ", ".join(_amount(name, value) for name, value in own[0].resources.items() if value)
    text = f"{number} of {len(own)} processes cannot be placed: each reserves {each}; all"
    return f"{text} reserve {_sums(wanted, nodes)} of {where}", _smaller(own, others, nodes)


def _amount(name: str, value: float) -> str:
    return f"{value:g} of one GPU" if name == "GPU" and value < 1 else f"{value:g} {name}"


def _sums(wanted: Sequence[Process], nodes: Sequence[Resources]) -> str:
    """Return the wanted and the available amount, by resource."""
    reserved = [process.resources for process in wanted]
    names = dict.fromkeys(name for item in reserved for name, value in item.items() if value)
    return ", ".join(f"{total(reserved, n):g} of {total(nodes, n):g} {n}" for n in names)


def _smaller(own: Sequence[Process], others: Sequence[Process], nodes: Sequence[Resources]) -> str:
    """Return a change that would let the processes of one owner be placed."""
    lacking = [name for name in missing(own[0], nodes) if name not in ("CPU", "GPU")]
    if lacking:
        shown = json.dumps({name: own[0].resources[name] for name in lacking})
        return (
            f"ray start --resources='{shown}' --head  # or --address=HEAD:6379, to join a cluster"
        )
    if own[0].resources.get("GPU"):
        share = gpu_share(own, others, nodes)
        effect = "" if share else "then on a CPU; "
        return f"num_gpus: {share:g}  # {effect}or fewer num_replicas, or another GPU"
    left = total(nodes, "CPU") - total((process.resources for process in others), "CPU")
    share = max(math.floor(round(100 * left / len(own), 6)) / 100, 0.0)
    if share >= own[0].resources["CPU"]:
        share = 0.0  # they fit in total, but not on any node
    effect = "or a node with more" if share else "reserves none; or fewer, or a node with more"
    return f"{_cpu_setting(own[0], share)}  # {effect}{_effect_on_threads(own[0])}"


def _cpu_setting(process: Process, num_cpus: float) -> str:
    """Return the line of the configuration that makes a process reserve this much."""
    if process.model is not None:
        return f"num_cpus: {num_cpus:g}"
    section = _SECTIONS.get(process.owner)
    if section is None:
        return "ray start --address=HEAD:6379"
    return f"{section}: {{num_cpus: {num_cpus:g}}}"


def _effect_on_threads(process: Process) -> str:
    """Return what a smaller reservation changes besides: from one CPU on, it is the number
    of a model's threads."""
    model = process.model
    if model is None or model.engine.num_threads is not None or model.num_cpus < 1:
        return ""
    return "; changes the threads, too, unless engine.num_threads is set"

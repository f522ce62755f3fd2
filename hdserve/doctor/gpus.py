"""Who runs on a GPU where the configuration leaves it to the cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hdserve.config import Device, ModelConfig, ServeConfig
from hdserve.doctor.placement import Process, Resources, unplaced

_BY_DEVICE: Mapping[Device, float] = {"cpu": 0.0, "cuda": 1.0}
"""What a replica reserves of a GPU where neither the configuration nor the cluster decides."""


class Shortage(NamedTuple):
    """Why models run on the CPU although there are GPUs.

    Attributes:
        remedy: as that of a :class:`~hdserve.doctor.finding.Finding`.
    """

    text: str
    remedy: str


def with_gpus(config: ServeConfig, nodes: Sequence[Resources]) -> ServeConfig:
    """Return ``config`` with a number for each ``num_gpus`` that it leaves out.

    Every replica of the models that leave it to the cluster gets a GPU, if there is room for all of
    them beside what others reserve; else none does.

    Args:
        nodes: all resources of each, reserved or not.
    """
    share = 1.0 if _has_room(config, nodes) else 0.0
    models = [
        model.model_copy(update={"num_gpus": _num_gpus(model, share)}) for model in config.models
    ]
    return config.model_copy(update={"models": tuple(models)})


def shortage(config: ServeConfig, nodes: Sequence[Resources]) -> Shortage | None:
    """Return which models run on the CPU only because there are fewer GPUs than replicas.

    Args:
        nodes: as in :func:`with_gpus`.
    """
    names = [model.name for model in config.models if _is_left_to_cluster(model)]
    if not names or not any(node.get("GPU") for node in nodes) or _has_room(config, nodes):
        return None
    own = [process for process in _replicas(config, nodes) if process.owner in names]
    others = [process for process in _replicas(config, nodes) if process.owner not in names]
    share = gpu_share(own, others, nodes)
    text = (
        f"{', '.join(names)}: on the CPU, since num_gpus is left out and there is not a GPU for "
        "each of their replicas"
    )
    effect = "of each, so that they share; 0 keeps a model" if share else "which keeps it"
    return Shortage(text, f"num_gpus: {share:g}  # {effect} on the CPU")


def on_its_device(model: ModelConfig) -> ModelConfig:
    """Return ``model`` as a replica runs it: without a GPU, ``auto`` is the CPU."""
    if model.num_gpus != 0 or model.engine.device != "auto":
        return model
    engine = model.engine.model_copy(update={"device": "cpu"})
    return model.model_copy(update={"engine": engine})


def gpu_share(
    own: Sequence[Process], others: Sequence[Process], nodes: Sequence[Resources]
) -> float:
    """Return the largest share of a GPU, smaller than what is reserved, with which the processes of
    ``own`` can be placed, so that as many as possible share a GPU; 0 if there is none."""
    for num_sharing in range(1, len(own) + 1):
        share = math.floor(100 / num_sharing) / 100
        smaller = [
            replace(process, resources={**process.resources, "GPU": share}) for process in own
        ]
        if share < own[0].resources["GPU"] and not unplaced([*others, *smaller], nodes):
            return share
    return 0.0


def _is_left_to_cluster(model: ModelConfig) -> bool:
    return model.num_gpus is None and model.engine.device not in _BY_DEVICE


def _num_gpus(model: ModelConfig, share: float) -> float:
    """Return what a replica reserves.

    Args:
        share: what it does if the cluster decides.
    """
    if model.num_gpus is not None:
        return model.num_gpus
    return _BY_DEVICE.get(model.engine.device, share)


def _has_room(config: ServeConfig, nodes: Sequence[Resources]) -> bool:
    """Return whether each replica of the models that leave it to the cluster finds a whole GPU,
    without taking one from others."""
    names = {model.name for model in config.models if _is_left_to_cluster(model)}
    wanted = [*_replicas(config, nodes)]
    others = [process for process in wanted if process.owner not in names]
    return len(unplaced(wanted, nodes)) == len(unplaced(others, nodes))


def _replicas(config: ServeConfig, nodes: Sequence[Resources]) -> Iterator[Process]:
    """Yield the replicas that each model has at first, or the one that it gets once it is asked, as
    if the cluster had a GPU for each of those that leave it to it.

    CPUs do not count, nor do custom resources that no node is known to have: without them no
    replica starts anyway.
    """
    known = {name for node in nodes for name in node}
    for model in config.models:
        custom = {name: number for name, number in model.resources.items() if name in known}
        resources = {"GPU": _num_gpus(model, 1.0), **custom}
        for _ in range(max(1, model.first_num_replicas)):
            yield Process(model.name, resources, model)

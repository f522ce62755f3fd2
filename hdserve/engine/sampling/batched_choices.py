"""The choices of all nodes of many sequences at once, for a GPU.

A walk that asks for one choice at a time would wait for the device at each node.  Noise is a
function of seed, choice and position, and a node's position is known in advance, so the choices
computed at all nodes are those a walk would make, whichever nodes it reaches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from hdserve.core import SamplingParams
from hdserve.engine.kernels.draw import NO_TOKEN
from hdserve.engine.sampling.sampler import choose
from hdserve.engine.sampling.topk import can_be_read

MAX_LOGITS: Final = 1 << 24
"""The most logits that tokens are chosen from at once, unless a single tree has more: float64
tensors of 128 MiB."""


class Nodes(NamedTuple):
    """The nodes of one tree, whose choices depend on their logits alone.

    Attributes:
        logits: ``[num_nodes, vocab_size]``.
        keys: of each node's position, see :mod:`hdserve.noise`.
    """

    logits: torch.Tensor
    params: SamplingParams
    keys: Sequence[int]


def choose_together(trees: Sequence[Nodes], max_logits: int = MAX_LOGITS) -> list[list[int]]:
    """What :func:`~hdserve.engine.sampling.sampler.choose` chooses at every node of every tree, or
    :data:`NO_TOKEN`; fetched from the device in one transfer.

    Args:
        max_logits: see :data:`MAX_LOGITS`.
    """
    groups: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for index, (_, params, _) in enumerate(trees):
        groups[params.temperature, params.top_k, params.top_p, params.min_p].append(index)
    order = [index for members in groups.values() for index in members]
    parts = [
        _choose(part)
        for members in groups.values()
        for part in _parts([trees[index] for index in members], max_logits)
    ]
    tokens = iter(torch.cat(parts).tolist() if parts else ())
    found: list[list[int]] = [[] for _ in trees]
    for index in order:
        found[index] = [next(tokens) for _ in trees[index].keys]
    return found


def _parts(trees: Sequence[Nodes], max_logits: int) -> Iterator[list[Nodes]]:
    """``trees`` in order, in groups of at most ``max_logits`` logits; at least one tree each."""
    part: list[Nodes] = []
    num_logits = 0
    for tree in trees:
        if part and num_logits + tree.logits.numel() > max_logits:
            yield part
            part, num_logits = [], 0
        part.append(tree)
        num_logits += tree.logits.numel()
    yield part


def _choose(trees: Sequence[Nodes]) -> torch.Tensor:
    """The tokens of trees with equal parameters, one after the other."""
    logits = torch.cat([tree.logits for tree in trees])
    if can_be_read(logits, torch.bfloat16):
        logits = logits.float()  # as the kernel for single choices reads them
    tokens = choose(logits, trees[0].params, [key for tree in trees for key in tree.keys])
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    return torch.where(chosen.isfinite(), tokens, NO_TOKEN)

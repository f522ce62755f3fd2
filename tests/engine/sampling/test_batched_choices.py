"""Choices that are made together are those that are made one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hdserve.core import SamplingParams
from hdserve.engine.kernels.draw import NO_TOKEN
from hdserve.engine.sampling.batched_choices import Nodes, choose_together
from hdserve.engine.sampling.sampler import choose_one
from hdserve.noise import position_key


def make_nodes(number: int, num_nodes: int, vocab_size: int, params: SamplingParams) -> Nodes:
    generator = torch.Generator().manual_seed(number)
    logits = 3.0 * torch.randn(num_nodes, vocab_size, generator=generator)
    return Nodes(logits, params, [position_key(number, node) for node in range(num_nodes)])


OPTIONS = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05, "temperature": 1.3},
    {"top_k": 40, "top_p": 0.95},
]


@pytest.mark.parametrize("vocab_size", [61, 5000])
def test_each_node_gets_what_it_gets_alone(vocab_size: int) -> None:
    """Trees of any sizes, with equal and with different parameters among each other."""
    params = [SamplingParams(**options) for options in [*OPTIONS, *OPTIONS[:3]]]
    trees = [
        make_nodes(number, 1 + 5 * number % 17, vocab_size, each)
        for number, each in enumerate(params)
    ]
    found = choose_together(trees)
    for tree, tokens in zip(trees, found, strict=True):
        assert tokens == [
            choose_one(tree.logits[node : node + 1], tree.params, tree.keys[node])
            for node in range(len(tree.logits))
        ]


def test_logits_that_are_no_numbers_give_no_token() -> None:
    """At their node alone."""
    nodes = make_nodes(1, 3, 61, SamplingParams())
    wanted = choose_together([nodes])[0]
    nodes.logits[1] = math.nan
    assert choose_together([nodes]) == [[wanted[0], NO_TOKEN, wanted[2]]]


def test_nothing_to_choose() -> None:
    assert choose_together([]) == []


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        self.size = max([self.size, *sizes])
        return made


def test_many_logits_are_not_worked_on_at_once() -> None:
    """Which would be some tensors in float64 of all the logits of a large batch; in float64 here,
    so that PyTorch chooses as on a GPU."""
    params = SamplingParams(top_p=0.8)
    trees = [make_nodes(number, 5, 61, params) for number in range(6)]
    trees = [tree._replace(logits=tree.logits.double()) for tree in trees]
    wanted = choose_together(trees)
    with Largest() as largest:
        assert choose_together(trees, max_logits=10 * 61) == wanted
    assert largest.size == 10 * 61

"""Choices that are made together are those that are made one by one."""

from __future__ import annotations

import math

import pytest
import torch

from hdserve.core import SamplingParams
from hdserve.engine.batched_choices import NO_TOKEN, Nodes, choose_together
from hdserve.engine.sampler import choose_one, uniform


def make_nodes(number: int, num_nodes: int, vocab_size: int, params: SamplingParams) -> Nodes:
    generator = torch.Generator().manual_seed(number)
    logits = 3.0 * torch.randn(num_nodes, vocab_size, generator=generator)
    return Nodes(logits, params, [uniform(number, 0, node) for node in range(num_nodes)])


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
            choose_one(tree.logits[node : node + 1], tree.params, tree.uniforms[node])
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

"""Compiled code multiplies the same rows by the weights of several layers in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdserve.engine.linear import gpu_skinny, prepacked  # noqa: F401 - with operators
from hdserve.engine.linear.multiply_together import MultiplyTogether
from hdserve.engine.linear.prepacked import prepacked_kernel
from hdserve.engine.linear.prepacked_weights import prepack
from tests.engine.linear.test_skinny import step

OPERATORS: list[tuple[str, tuple[int, ...]]] = [
    ("gpu_skinny_linear", ()),
    ("prepacked_linear", (64,)),
]
"""Names, and what they take behind rows, weights and bias."""

OPERATORS_OF_SEVERAL = {
    "gpu_skinny_linear": ("gpu_skinny_linears",),
    "prepacked_linear": ("two_prepacked_linears", "three_prepacked_linears"),
}


def graph_of(name: str, others: tuple[int, ...], *calls: tuple[str, str]) -> torch.fx.Graph:
    """One that multiplies, ``rows`` by weights each, both inputs of the graph but for ``computed``
    weights."""
    graph = torch.fx.Graph()
    names = dict.fromkeys(each for call in calls for each in call if each != "computed")
    nodes = {each: graph.placeholder(each) for each in names}
    for node in nodes.values():
        node.meta["val"] = torch.empty(4, 64)
    products = []
    for rows, weight in calls:
        if weight == "computed":
            given = graph.call_function(torch.ops.aten.neg.default, (nodes["a"],))
        else:
            given = nodes[weight]
        multiply = getattr(torch.ops.hdserve, name).default
        products.append(graph.call_function(multiply, (nodes[rows], given, None, *others)))
        products[-1].meta["val"] = torch.empty(4, 64)
    graph.output(tuple(products))
    return graph


CALLS: list[tuple[list[tuple[str, str]], list[int]]] = [
    ([("x", "a"), ("y", "b")], []),
    ([("x", "a"), ("y", "b"), ("x", "c")], [2]),
    ([("x", name) for name in "abcde"], [3, 2]),
    ([("x", name) for name in "abcd"], [3]),
    ([("x", "a"), ("x", "computed"), ("x", "b")], [2]),
]


@pytest.mark.parametrize(("name", "others"), OPERATORS)
@pytest.mark.parametrize(("calls", "numbers"), CALLS, ids=str)
def test_calls_of_the_same_rows_are_merged(
    name: str, others: tuple[int, ...], calls: list[tuple[str, str]], numbers: list[int]
) -> None:
    """Three at most, and not those by weights that are computed after the first of them."""
    graph, merged = graph_of(name, others, *calls), graph_of(name, others, *calls)
    MultiplyTogether()(merged)
    merged.lint()
    together = [getattr(torch.ops.hdserve, each).default for each in OPERATORS_OF_SEVERAL[name]]
    found = [len(node.users) for node in merged.nodes if node.target in together]
    assert found == numbers
    if name == "prepacked_linear" and prepacked_kernel(torch.bfloat16) is None:
        return
    inputs = [given(node.name, name) for node in graph.nodes if node.op == "placeholder"]
    with step():
        wanted = torch.fx.GraphModule({}, graph)(*inputs)
        products = torch.fx.GraphModule({}, merged)(*inputs)
    assert all(map(torch.equal, products, wanted))


def given(node: str, name: str) -> Any:
    """What a graph takes: rows, or weights as the operator takes them."""
    if node in ("x", "y"):
        return torch.randn(4, 64).bfloat16()
    weights = torch.randn(64, 64).bfloat16()
    return prepack(weights) if name == "prepacked_linear" else weights

"""Products of the same rows by the weights of several layers, in one call of compiled code."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from hdserve.engine.linear import gpu_skinny, prepacked  # noqa: F401 - with operators

_MAX_TOGETHER = 3
"""The most layers of the same input that are combined."""

_Nodes = Sequence[torch.fx.Node]


class MultiplyTogether(CustomGraphPass):
    """Makes compiled code multiply the same rows by the weights of several layers in one call: one
    loop to divide among threads, and one tensor of rows (docs/adr/0031, 0034).

    Not for computed weights, which may not exist yet when the first of the layers is called.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        together = {
            torch.ops.hdserve.gpu_skinny_linear.default: _gpu_skinny,
            torch.ops.hdserve.prepacked_linear.default: _prepacked,
        }
        groups: dict[tuple[Any, ...], list[torch.fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.target in together:
                rows, weight, bias = node.args[:3]
                if all(each is None or _is_given(each) for each in (weight, bias)):
                    groups[node.target, rows, bias is None].append(node)
        for (target, *_), group in groups.items():
            for first in range(0, len(group), _MAX_TOGETHER):
                nodes = group[first : first + _MAX_TOGETHER]
                if len(nodes) > 1:
                    _replace(graph, nodes, *together[target](nodes))

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _is_given(node: Any) -> bool:
    return bool(node.op in ("placeholder", "get_attr"))


def _gpu_skinny(nodes: _Nodes) -> tuple[Any, tuple[Any, ...]]:
    """The operator that replaces ``nodes``, and its arguments."""
    rows, weights, biases = nodes[0].args[0], *_columns(nodes)
    return torch.ops.hdserve.gpu_skinny_linears.default, (rows, weights, biases)


def _prepacked(nodes: _Nodes) -> tuple[Any, tuple[Any, ...]]:
    found = torch.ops.hdserve
    of_several = {2: found.two_prepacked_linears.default, 3: found.three_prepacked_linears.default}
    arguments = [each for column in _columns(nodes) for each in column]
    return of_several[len(nodes)], (nodes[0].args[0], *arguments)


def _columns(nodes: _Nodes) -> list[list[Any]]:
    """The arguments of ``nodes`` after the rows, grouped: the first ones of all nodes, the second
    ones, and so on."""
    return [[*column] for column in zip(*(node.args[1:] for node in nodes), strict=True)]


def _replace(graph: torch.fx.Graph, nodes: _Nodes, target: Any, arguments: tuple[Any, ...]) -> None:
    with graph.inserting_before(nodes[0]):
        together = graph.call_function(target, arguments)
        parts = [graph.call_function(operator.getitem, (together, i)) for i in range(len(nodes))]
    together.meta["val"] = [node.meta["val"] for node in nodes]
    for node, part in zip(nodes, parts, strict=True):
        part.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(part)
        graph.erase_node(node)

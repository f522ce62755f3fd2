"""Leaving out, in the last layer of a compiled model, what belongs to rows without logits.

Of most rows of a prompt a forward only needs the keys and values in each layer, and no logits.  So
nothing reads what the last layer computes for them after its keys and values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from hdserve.engine.attention import packed  # noqa: F401 - with operators
from hdserve.engine.linear import prepacked, skinny  # noqa: F401 - with operators

_aten, _ours = torch.ops.aten, torch.ops.hdserve

_PRODUCTS: Final = (_ours.prepacked_linear.default, _ours.skinny_linear.default)
"""What is worth the change; they multiply each row of their first argument alike."""

_VIEWS: Final = (_aten.reshape.default, _aten.view.default)
_SPLITS: Final = (_aten.split.Tensor, _aten.split_with_sizes.default)
_CONVERSION: Final = torch.ops.prims.convert_element_type.default
_ATTENTION: Final = _ours.packed_attention.default
_ROWS: Final = 1
"""The dimension of rows, after one of size one."""

_Nodes = Sequence[torch.fx.Node]


class _Selection(NamedTuple):
    """A node that selects ``rows`` of all ``states``, of which there are ``num_rows``."""

    node: torch.fx.Node
    states: torch.fx.Node
    rows: torch.fx.Node
    num_rows: torch.SymInt


class OmitUnreadRows(CustomGraphPass):
    """Makes compiled code select the rows with logits before the last layer's own products, not
    after them::

        residual ---------- + -- MLP -- rows        residual -- rows ---------- + -- MLP
        attention -- linear /                       attention -- rows -- linear /

    What then follows the selection computes each row by itself.  Attention that nothing else reads
    is told which of its rows are read.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        for selection in _selections(graph):
            unread = _only_selected(graph, selection)
            if any(node.target in _PRODUCTS for node in unread):
                _move(graph, selection, unread)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _selections(graph: torch.fx.Graph) -> list[_Selection]:
    """Those of rows of an input of the graph, which is there before all that might be moved."""
    found = []
    for node in graph.find_nodes(op="call_function", target=_aten.index.Tensor):
        states, indices = node.args
        shape = states.meta["val"].shape
        is_of_rows = len(shape) > _ROWS + 1 and isinstance(shape[_ROWS], torch.SymInt)
        if is_of_rows and len(indices) == _ROWS + 1 and indices[0] is None:
            rows = indices[1]
            is_list = rows.meta["val"].dim() == 1 and rows.meta["val"].dtype is torch.int64
            if rows.op == "placeholder" and is_list:
                found.append(_Selection(node, states, rows, shape[_ROWS]))
    return found


def _only_selected(graph: torch.fx.Graph, selection: _Selection) -> _Nodes:
    """The nodes that compute each row by itself and that nothing but the selection reads, directly
    or through each other; in their order."""
    found = list[torch.fx.Node]()
    readers = {selection.node}
    for node in reversed(graph.nodes):
        if node.users and readers.issuperset(node.users) and _is_by_row(node, selection.num_rows):
            found.append(node)
            readers.add(node)
    # A part of several tensors, of which others are read besides, is itself selected.
    return [node for node in reversed(found) if not _is_part(node) or node.args[0] in readers]


def _is_part(node: torch.fx.Node) -> bool:
    return node.target is operator.getitem


def _is_by_row(node: torch.fx.Node, num_rows: torch.SymInt) -> bool:
    """Whether each row of the result is computed of the same row of what the node takes."""
    if node.op != "call_function" or not _has_rows(node, num_rows):
        return False
    shape, taken = _shape_of(node), node.all_input_nodes
    of_rows = [each for each in taken if _has_rows(each, num_rows)]
    if node.target in _VIEWS:
        return of_rows == [node.args[0]] and all(isinstance(n, int) for n in shape[_ROWS + 1 :])
    if any(_mentions(each, num_rows) for each in {*taken} - {*of_rows}):
        return False
    if node.target in _PRODUCTS:
        return of_rows == [node.args[0]]
    last = (-1, len(shape) - 1)
    if node.target in _SPLITS:
        return len(node.args) > 2 and node.args[2] in last
    if node.target is _aten.mean.dim:
        return node.args[1:] in [([each], True) for each in last]
    if node.target is _aten.var_mean.correction:
        is_of_last = node.args[1] in [[each] for each in last]
        return is_of_last and node.kwargs.get("keepdim") is True
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    is_each = is_pointwise or node.target is _CONVERSION or _is_part(node)
    return is_each and all(len(_shape_of(each)) == len(shape) for each in of_rows)


def _has_rows(node: torch.fx.Node, num_rows: torch.SymInt) -> bool:
    """Whether the node gives ``[1, num_rows, ...]``."""
    shape = _shape_of(node)
    return len(shape) > _ROWS + 1 and shape[0] == 1 and str(shape[_ROWS]) == str(num_rows)


def _mentions(node: torch.fx.Node, num_rows: torch.SymInt) -> bool:
    """Whether what the node gives is the number of rows or has a size that depends on it; or on a
    number whose name begins as its name, which is on the safe side."""
    return str(num_rows) in str(_shape_of(node) or node.meta.get("val"))


def _shape_of(node: torch.fx.Node) -> tuple[Any, ...]:
    """That of the first tensor if there are several; empty if there is none, as for the graph of a
    layer that is compiled for all."""
    value = node.meta.get("val")
    return tuple(getattr(value[0] if isinstance(value, list | tuple) else value, "shape", ()))


def _move(graph: torch.fx.Graph, selection: _Selection, nodes: _Nodes) -> None:
    """Select the rows of what ``nodes`` take from others."""
    moved, selected = {*nodes}, dict[torch.fx.Node, torch.fx.Node]()
    for node in nodes:
        for taken in node.all_input_nodes:
            if taken not in moved and _has_rows(taken, selection.num_rows):
                if taken not in selected:
                    with graph.inserting_before(node):
                        selected[taken] = _select(graph, taken, selection.rows)
                node.replace_input_with(taken, selected[taken])
        if node.target in _VIEWS:
            node.target = _aten.reshape.default
            node.args = (node.args[0], [1, -1, *_shape_of(node)[_ROWS + 1 :]])
        _infer(node)
    selection.node.replace_all_uses_with(selection.states)
    graph.erase_node(selection.node)
    for taken, its_rows in selected.items():
        if taken.target is _ATTENTION and {*taken.users} == {its_rows}:
            taken.kwargs = {**taken.kwargs, "read_rows": selection.rows}
            _infer(taken)


def _select(graph: torch.fx.Graph, node: torch.fx.Node, rows: torch.fx.Node) -> torch.fx.Node:
    selected = graph.call_function(_aten.index.Tensor, (node, [None, rows]))
    _infer(selected)
    return selected


def _infer(node: torch.fx.Node) -> None:
    """Note what the node takes and gives, as fake as what it takes."""

    def value(taken: torch.fx.Node) -> Any:
        return taken.meta["val"]

    args = cast("tuple[Any, ...]", torch.fx.map_arg(node.args, value))
    options = cast("dict[str, Any]", torch.fx.map_arg(node.kwargs, value))
    fake_mode = detect_fake_mode((args, options))
    assert fake_mode is not None, "graphs are compiled with fake tensors"
    with fake_mode:
        node.meta["val"] = cast("Callable[..., Any]", node.target)(*args, **options)
    if "eager_input_vals" in node.meta:  # by whose strides the compiler lays out what it takes
        node.meta["eager_input_vals"] = (args, options)

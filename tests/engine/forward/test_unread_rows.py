"""What the last layer computes for rows without logits is left out, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

from hdserve.config import EngineConfig
from hdserve.engine.forward.compiled import can_compile
from hdserve.engine.forward.unread_rows import OmitUnreadRows
from hdserve.engine.loading.compilation import compile_model
from hdserve.engine.loading.loader import prepare_model
from hdserve.errors import UnsupportedModel
from tests.engine.linear.test_skinny import step
from tests.models import ARCHITECTURES, make_model

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

SIZE = 64
"""Half of it are whole vectors of any processor."""
ATTENTION = torch.ops.hdserve.packed_attention.default
PRODUCT = torch.ops.hdserve.skinny_linear.default

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def linear(states: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    found = torch.ops.hdserve.skinny_linear(states, weight, weight, None, limit)
    assert isinstance(found, torch.Tensor)
    return found


def layer(
    states: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    num_rows = states.shape[1]
    attended = states.cumsum(1).reshape(1, num_rows, -1, 4)
    states = states + linear(attended.reshape(1, num_rows, -1), weight, limit)
    normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (states + linear(F.silu(linear(normed, weight, limit)), weight, limit))[:, rows]


def read_besides(
    states: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    found = linear(states, weight, limit)
    return found[:, rows] + found.mean()


def mixed(
    states: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    return linear(states, weight, limit).cumsum(1)[:, rows]


def shared_out(
    states: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """A mean over rows, not over what a row has."""
    found = linear(states, weight, limit)
    return (found - found.mean(1, keepdim=True))[:, rows]


def halved(
    states: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """By a gate of the same product, as in Phi-3."""
    gate, up = linear(states, weight, limit).chunk(2, -1)
    return linear(F.silu(gate) * up, weight[:, : SIZE // 2], limit)[:, rows]


def halved_otherwise(
    states: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Into parts that are not by row."""
    first, second = linear(states, weight, limit).expand(2, -1, -1).split(1)
    return linear(first + second, weight, limit)[:, rows]


def half_read(
    states: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Of two parts the other is read besides."""
    first, second = linear(states, weight, limit).chunk(2, -1)
    return linear(F.silu(first), weight[:, : SIZE // 2], limit)[:, rows] + second.mean()


def flattened(
    states: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Rows that are not in their dimension."""
    return linear(states.reshape(-1, SIZE), weight, limit).unsqueeze(0)[:, rows]


def scaled(
    states: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """By numbers of rows that are in another dimension."""
    return (linear(states, weight, limit) * states[0].mean(1, keepdim=True))[:, rows]


GENERATOR = torch.Generator().manual_seed(0)
STATES = (
    torch.randn(1, 7, SIZE, generator=GENERATOR),
    torch.randn(SIZE, SIZE, generator=GENERATOR) / SIZE**0.5,
    torch.tensor(32),
)
ROWS = torch.tensor([5, 2, 2, 6])


class Calls(torch.nn.Module):
    """A function as a module, which PyTorch exports."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self._function = function

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        return self._function(*arguments)


def passed(function: Function) -> torch.fx.Graph:
    """The graph of a function after the pass; numbers of states and of rows are variables."""
    sizes = ({1: torch.export.Dim("n")}, None, None, {0: torch.export.Dim("m")})
    exported = torch.export.export(Calls(function), (*STATES, ROWS), dynamic_shapes=(sizes,))
    graph = exported.run_decompositions().graph_module.graph
    OmitUnreadRows()(graph)
    graph.lint()
    return graph


@pytest.mark.parametrize(
    ("function", "num_moved"),
    [
        *((layer, 3), (read_besides, 0), (mixed, 0), (shared_out, 0), (flattened, 0), (scaled, 0)),
        *((halved, 2), (halved_otherwise, 1), (half_read, 1)),
    ],
)
@torch.inference_mode()
def test_only_what_nothing_else_reads_is_selected_first(function: Function, num_moved: int) -> None:
    graph = passed(function)
    number = [*graph.find_nodes(op="placeholder")][-1].meta["val"].shape[0]
    products = graph.find_nodes(op="call_function", target=PRODUCT)
    moved = [node for node in products if number in node.meta["val"].shape]
    assert len(moved) == num_moved
    states, weight, limit = STATES
    with step():
        for some in (ROWS, ROWS[:1], torch.arange(7)):
            (found,) = torch.fx.GraphModule({}, graph)(states, weight, limit, some)
            torch.testing.assert_close(found, function(states, weight, limit, some))


@pytest.mark.parametrize("is_read_besides", [False, True])
def test_attention_is_told_what_is_read_if_nothing_else_reads_it(is_read_besides: bool) -> None:
    def attend(
        states: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        heads = states.unsqueeze(1)
        found = torch.ops.hdserve.packed_attention(
            heads, heads, heads, limit, None, None, None, None
        )
        read = linear(found.flatten(2), weight, limit)[:, rows]
        return read + found.mean() if is_read_besides else read

    graph = passed(attend)
    (attention,) = graph.find_nodes(op="call_function", target=ATTENTION)
    assert ("read_rows" in attention.kwargs) != is_read_besides


FIRST = ["llama", "gpt_neox"]
NOT_HERE = {"gpt_oss", "gemma4"}
"""The one is not compiled, the other has layers of four inputs, which are PyTorch's."""

ARCHITECTURES_HERE = FIRST + [
    pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(ARCHITECTURES.keys() - {*FIRST} - NOT_HERE)
]


class See(CustomGraphPass):
    """Keeps a graph, and raises, so that no code is made of it."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append(graph)
        raise RuntimeError("seen")

    def uuid(self) -> Any:
        return None


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.skipif(not can_compile(), reason="there is no C++ compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES_HERE)
def test_last_layers_are_those_of_transformers(architecture: str) -> None:
    see = See()
    loaded = prepare_model(make_model(architecture, torch.float32), EngineConfig(exact=True))
    options: dict[str, Any] = {"post_grad_custom_post_pass": see}
    with (
        fresh_cache(),
        torch._inductor.config.patch(options),
        pytest.raises(UnsupportedModel, match="seen"),
    ):
        compile_model(loaded)
    nodes = [*see.graphs[0].nodes]
    last = max(index for index, node in enumerate(nodes) if node.target is ATTENTION)
    assert "read_rows" in nodes[last].kwargs
    num_rows = nodes[last].meta["val"].shape[1]
    products = [node for node in nodes if "linear" in str(node.target)]
    of_all = [node for node in products if num_rows in node.all_input_nodes[0].meta["val"].shape]
    assert len(products) - len(of_all) > 2
    assert not {*of_all} & {*nodes[last:]}

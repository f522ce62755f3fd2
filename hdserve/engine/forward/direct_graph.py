"""A graph of PyTorch's compiler, called by its own inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

_INPUTS: Final[Mapping[str, int]] = {
    "L['token_ids']": 0,
    "L['position_ids']": 1,
    "L['logit_rows']": 2,
    "L['token_ids'].size()[0]": 3,
    "L['logit_rows'].size()[0]": 4,
}
"""What a graph of :class:`~hdserve.engine.forward.compiled.CompiledForward` may take, as PyTorch
names it."""


class DirectGraph:
    """Calls a graph as compiled code does after it has found it, which takes longer than a small
    model's layer: it asks its guards, and gathers the inputs anew.

    Args:
        run: takes the inputs of the graph in their order, and gives its outputs.
        places: of each input among the values of :data:`_INPUTS`.
    """

    def __init__(self, run: Callable[..., Sequence[torch.Tensor]], places: Sequence[int]) -> None:
        self._run = run
        self._places = places

    @classmethod
    def of(cls, graph: torch.fx.GraphModule, run: Callable[..., Any]) -> DirectGraph | None:
        """``None`` if ``graph``, of which ``run`` was made, takes anything else, such as weights,
        or was not made for any number of rows and of logits."""
        names = [_name(node) for node in graph.graph.nodes if node.op == "placeholder"]
        if {*names} != _INPUTS.keys():
            return None
        return cls(run, [_INPUTS[name] for name in names])

    def __call__(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """The logits; like the arguments, without a batch dimension."""
        sizes = token_ids.shape[0], logit_rows.shape[0]
        given = (token_ids, position_ids, logit_rows, *sizes)
        (logits,) = self._run(*[given[place] for place in self._places])
        return logits


def _name(node: torch.fx.Node) -> str:
    """What PyTorch says that an input of a graph is; empty if it does not."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return str(getattr(source, "name", ""))

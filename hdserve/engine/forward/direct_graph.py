"""A graph of PyTorch's compiler, called by its own inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hdserve.engine.forward.graphs_by_rows import Run

TOKEN_IDS: Final = "L['token_ids']"

_ARGUMENTS: Final[Mapping[str, int]] = {
    TOKEN_IDS: 0,
    "L['position_ids']": 1,
    "L['logit_rows']": 2,
    "L['token_ids'].size()[0]": 3,
    "L['logit_rows'].size()[0]": 4,
}
"""What a graph of :class:`~hdserve.engine.forward.compiled.CompiledForward` may take beside the
tensors of the model, as PyTorch names it."""


class DirectGraph:
    """Calls a graph as compiled code does once it has found it.  Compiled code asks guards first,
    and gathers the tensors of the model, which takes longer than a layer of a small model.

    Args:
        run: takes the inputs of the graph in their order, and gives its outputs.
        inputs: all inputs; those that are arguments are replaced at each call.
        places: of each argument, in the order of :data:`_ARGUMENTS`, among the inputs.
        takes_tensors: whether numbers are given as tensors: a wrapper in C++ takes nothing else,
            and makes one of each number in 8 us.
    """

    def __init__(
        self,
        run: Run,
        inputs: Sequence[Any],
        places: Sequence[int],
        *,
        takes_tensors: bool,
    ) -> None:
        self._run = run
        self._inputs = [*inputs]
        self._places = places
        self._number = cache(torch.tensor) if takes_tensors else int

    @classmethod
    def of(
        cls, graph: torch.fx.GraphModule, inputs: Sequence[Any], run: Run, *, takes_tensors: bool
    ) -> DirectGraph | None:
        """``None`` if ``graph``, of which ``run`` was made, was not made for any number of rows and
        of logits, takes anything else than that and tensors of the model, or gives more than
        logits: what the model has stored in its modules.

        Args:
            inputs: for which it was made.
            takes_tensors: see :class:`DirectGraph`.
        """
        names = names_of_inputs(graph)
        others = [each for name, each in zip(names, inputs, strict=True) if name not in _ARGUMENTS]
        are_tensors = all(
            isinstance(each, torch.Tensor) and not isinstance(each, FakeTensor) for each in others
        )
        if not are_tensors or not names or _ARGUMENTS.keys() - {*names} or _num_outputs(graph) > 1:
            return None
        places = [names.index(name) for name in _ARGUMENTS]
        return cls(run, inputs, places, takes_tensors=takes_tensors)

    def __call__(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """The logits; like the arguments, without a batch dimension."""
        number, inputs = self._number, self._inputs.copy()
        sizes = number(token_ids.shape[0]), number(logit_rows.shape[0])
        given = (token_ids, position_ids, logit_rows, *sizes)
        for place, each in zip(self._places, given, strict=True):
            inputs[place] = each
        (logits,) = self._run(*inputs)
        return logits


def names_of_inputs(graph: torch.fx.GraphModule) -> list[str]:
    """What PyTorch says that each input of ``graph`` is; empty where it does not."""
    return [_name(node) for node in graph.graph.nodes if node.op == "placeholder"]


def _num_outputs(graph: torch.fx.GraphModule) -> int:
    (outputs,) = graph.graph.output_node().args
    return len(cast("Sequence[Any]", outputs))


def _name(node: torch.fx.Node) -> str:
    source = getattr(node.meta.get("grapharg"), "source", None)
    return str(getattr(source, "name", ""))

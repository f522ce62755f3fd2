"""Several changes to a graph before it is compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass


class GraphPasses(CustomGraphPass):
    """Changes a graph by one pass after the other; the compiler takes a single one."""

    def __init__(self, *passes: CustomGraphPass) -> None:
        self._passes = passes

    def __call__(self, graph: torch.fx.Graph) -> None:
        for change in self._passes:
            change(graph)

    def uuid(self) -> Any:
        return tuple(change.uuid() for change in self._passes)

"""Forwards as CUDA graphs: a launch for a forward, not one for each of its kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, cast

import torch

from hdserve.engine.batch import ForwardBatch

logger = logging.getLogger(__name__)

MAX_GRAPH_ROWS: Final = 256
"""Larger forwards take longer than launching their kernels does."""

_NUM_WARM_UPS: Final = 2
"""Forwards before a graph is made: what is compiled or chosen by trying is, then."""

_ERROR_MODE: Final = "thread_local"
"""What other threads tell the device meanwhile, such as another engine's, spoils no graph."""

Forward = Callable[[ForwardBatch], torch.Tensor]


class ForwardGraphs:
    """Runs batches that are fixed by a graph for each number of rows, made when it is first met.

    Where no graph can be made, as for models that branch on what they compute, it says so once, and
    the model runs without.

    Args:
        forward: the logits ``[n, vocab_size]`` of the batch's ``n`` logit rows.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._has_failed = False

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """As ``forward``, in a tensor that the next batch overwrites: graphs share their memory."""
        num_rows = batch.token_ids.shape[1]
        if not batch.is_fixed or self._has_failed or num_rows > MAX_GRAPH_ROWS:
            return self._forward(batch)
        if num_rows not in self._graphs and not self._capture(batch, num_rows):
            return self._forward(batch)
        graph, logits = self._graphs[num_rows]
        graph.replay()
        return logits

    def _capture(self, batch: ForwardBatch, num_rows: int) -> bool:
        """Make the graph of ``num_rows``; whether it could be made."""
        beside = self._stream = self._stream or cast("Any", torch.cuda).Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_NUM_WARM_UPS):
                self._forward(batch)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=_ERROR_MODE):
                logits = self._forward(batch)
        except RuntimeError as error:
            logger.warning("forwards run without CUDA graphs: %s", str(error).splitlines()[0])
            self._has_failed = True
            return False
        self._pool = self._pool or graph.pool()
        self._graphs[num_rows] = graph, logits
        return True

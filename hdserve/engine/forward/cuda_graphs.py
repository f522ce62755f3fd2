"""Forwards as CUDA graphs: one launch for a forward instead of one for each of its kernels."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, Final, cast

import torch

from hdserve.engine.batch.forward_batch import BatchDescriptor, ForwardBatch

logger = logging.getLogger(__name__)

MAX_GRAPH_LOGITS: Final = 256
"""The most rows with logits of a graph."""

_ERROR_MODE: Final = "thread_local"
"""Only calls of the capturing thread can break a capture; other threads, such as that of another
engine, may use the device meanwhile."""

_WAITING: Final = "called a synchronizing CUDA operation"
"""A part of PyTorch's warning of an operation that waits for the device."""

Forward = Callable[[ForwardBatch], torch.Tensor]


class ForwardGraphs:
    """Runs each kind of batch as a CUDA graph, captured when the kind first occurs.

    If no graph can be captured, as for models that branch on what they compute, one warning is
    logged, and the model runs without graphs.
    """

    def __init__(self) -> None:
        self._graphs: dict[BatchDescriptor, torch.cuda.CUDAGraph] = {}
        self._logits: torch.Tensor | None = None
        self._pool: Any = None
        self._stream: Any = None
        self._has_failed = False

    def __call__(self, forward: Forward, batch: ForwardBatch) -> torch.Tensor:
        """Run ``forward``; the result is in a tensor that the next batch overwrites, since graphs
        share their memory.

        Args:
            forward: the logits ``[n, vocab_size]`` of the batch's ``n`` logit rows; the same each
                time.  Not kept: it would keep its owner, and with it the KV cache, from being freed
                at once.

        Raises:
            torch.OutOfMemoryError: there is no memory for a graph.
        """
        kind = batch.kind
        if kind is None or (self._has_failed and kind not in self._graphs):
            return forward(batch)
        if kind not in self._graphs and not self._capture(forward, batch, kind):
            return forward(batch)
        self._graphs[kind].replay()
        assert self._logits is not None, "a graph writes them"
        return self._logits[: kind.num_logits]

    def _capture(self, forward: Forward, batch: ForwardBatch, kind: BatchDescriptor) -> bool:
        """Capture the graph of ``kind``; whether that was possible."""
        beside = self._stream = self._stream or cast("Any", torch.cuda).Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            logits = forward(batch)  # afterwards all is compiled, and chosen by trial
            is_waiting = _waits(forward, batch)
        torch.cuda.current_stream().wait_stream(beside)
        if is_waiting:
            return self._do_without("the model waits for what it has computed")
        if self._logits is None:
            self._logits = logits.new_empty((MAX_GRAPH_LOGITS, logits.shape[1]))
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.stream(beside),  # restores the stream, which a failed capture does not
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode=_ERROR_MODE),
            ):
                self._logits[: kind.num_logits].copy_(forward(batch))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return self._do_without(str(error).partition("\n")[0])
        self._pool = self._pool or graph.pool()
        self._graphs[kind] = graph
        return True

    def _do_without(self, reason: str) -> bool:
        logger.warning("forwards run without CUDA graphs: %s", reason)
        self._has_failed = True
        return False


def _waits(forward: Forward, batch: ForwardBatch) -> bool:
    """Whether a forward waits for the device, as far as PyTorch can tell.

    Such a forward cannot be captured, and a failed capture leaves PyTorch's allocator as if it were
    still capturing: it then never releases memory to find room for more.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            forward(batch)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return any(_WAITING in str(each.message) for each in found)

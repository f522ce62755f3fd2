"""Running the model: packed chunks in, logits out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch

from hdserve.engine import gpu_kernels
from hdserve.engine.attention.cpu_tree import UNLIMITED, CpuTreeAttention
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.forward_batch import ForwardBatch, build_batch
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.batch.step_context import running
from hdserve.engine.forward.compiled import CompiledForward
from hdserve.engine.forward.cuda_graphs import ForwardGraphs
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.forward.node_outputs import NodeOutputs, TopTokens
from hdserve.engine.forward.static_batches import CAPTURE_SHAPES, StaticBatches
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.sampling.gpu_choices import FoundTokens, GpuChoices
from hdserve.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_COMPILATIONS = 1 << 20
"""Of attention by all engines of a process, each its own; PyTorch would run what was compiled 256
times uncompiled, which takes as much memory as rows and cache multiplied."""


class ModelRunner:
    """Runs one forward at a time over the chunks of many sequences.

    Args:
        cache: holds the keys and values of all sequences.
        needs_hidden: whether forwards return hidden states too, for which no model is compiled.
        max_draft_tokens: see :class:`~hdserve.engine.forward.static_batches.StaticBatches`.
        attends_in_one_call: whether all rows attend in one call; ``None``: if compiled, so on a
            GPU.

    Attributes:
        compiled: runs the model instead of its own modules, once there is one.
        shapes: of the next forwards, except static batches, which have their own.
        max_depth: of drafts, up to which a row's attention does not depend on where they lie.
        chooses_together: whether to sample at all nodes of a forward at once; on a GPU, waiting for
            one choice after the other takes longer.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        *,
        needs_hidden: bool = False,
        max_draft_tokens: int = 0,
        attends_in_one_call: bool | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.needs_hidden = needs_hidden
        self._workers = Workers()
        self._is_gpu = is_gpu = cache.device.type == "cuda"
        self._static: StaticBatches | None = None
        if is_gpu if attends_in_one_call is None else attends_in_one_call:
            self._static = StaticBatches(
                cache, max_draft_tokens, self._workers, num_heads=model.num_heads
            )
            cache.is_read_whole = True
        self.chooses_together = is_gpu or self._static is not None
        self._graphs = ForwardGraphs() if self._static and is_gpu else None
        has_kernels = gpu_kernels.are_available(cache.device)
        self._choices = GpuChoices() if has_kernels else None
        self.shapes = Shapes()
        self._attention: CpuTreeAttention | None = None
        if CpuTreeAttention.can_read(cache):
            self._attention = CpuTreeAttention(cache, self._workers, model.max_attended_rows)
        self.max_depth = UNLIMITED if self._attention is None else self._attention.max_depth
        if self._static is not None:
            self.max_depth = min(self.max_depth, self._static.max_depth)
        self.compiled: CompiledForward | None = None

    def compile_with(self, compiled: CompiledForward | None) -> None:
        """Run the model by ``compiled``, or by its own modules; sets the shapes that fit this."""
        self.compiled = compiled
        self.shapes = Shapes() if compiled is None else compiled.shapes
        if self._graphs is not None:
            self._graphs = ForwardGraphs()

    @torch.inference_mode()
    def warm_up(self, max_rows: int) -> None:
        """On a GPU, compile what forwards of up to ``max_rows`` need, and capture their graphs; as
        long as that fails, :meth:`fall_back`.

        Raises:
            ConfigError: there is no memory for the largest forward.
        """
        while self._static is not None:
            with torch._dynamo.config.patch(accumulated_recompile_limit=_MAX_COMPILATIONS):
                fault = self._fault_in(self._static, max_rows)
            if fault is None:
                return
            self.fall_back(fault)

    def _fault_in(self, static: StaticBatches, max_rows: int) -> str | None:
        """Run a forward of each kind; why one fails, if one does."""
        try:
            for num_rows in CAPTURE_SHAPES.row_counts:
                for batch in static.empty(num_rows):
                    self._run(batch)
                if num_rows >= max_rows:
                    break
            self._wait()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"beside a KV cache of {self.cache.num_rows} tokens a forward of {max_rows} rows "
                "does not fit; lower kv_cache_tokens, prefill_chunk_tokens or max_num_sequences: "
                + str(error).partition("\n")[0]
            ) from error
        except Exception as error:  # compilers raise anything
            return str(error)
        return None

    def fall_back(self, reason: str) -> None:
        """Stop using one more kernel, and the graphs that call it: first ours for trees, then ours
        for few rows, finally FlexAttention, so that sequences attend one by one.

        Nothing is warmed up any more.  Call it while :attr:`attends_in_one_call`.
        """
        static, reason = self._static, reason.partition("\n")[0]
        assert static is not None, "one by one is the last way to attend"
        if static.has_tree_kernel:
            logger.warning(
                "the tree attention kernel is disabled, FlexAttention is used: %s", reason
            )
            static.disable_tree_kernel()
        elif static.has_row_products:
            logger.warning("our products of few rows are disabled, PyTorch's are used: %s", reason)
            static.disable_row_products()
        else:
            logger.warning(
                "FlexAttention is disabled, one SDPA call per sequence is used (slower): %s", reason
            )
            self._static = None
        if self._graphs is not None:
            self._graphs = None if self._static is None else ForwardGraphs()

    @property
    def static_shapes(self) -> Shapes:
        """How forwards are padded whose shapes are few, as on a GPU; of any others nothing."""
        is_static = self._static is not None and not self.shapes.is_exact
        return CAPTURE_SHAPES if is_static else Shapes()

    @property
    def rounds_alike(self) -> bool:
        """Whether prompt tokens and decoded tokens go through the same kernels.  On a GPU they do
        not: drafts verified together with a prompt would differ by rounding from decoding alone
        (docs/adr/0035)."""
        return self._static is None

    @property
    def finds_tokens(self) -> bool:
        """Whether forwards find the likeliest tokens themselves, so that asking for a few takes no
        time, and draw those of chunks that have a race."""
        return self._choices is not None and not self.needs_hidden

    @property
    def attends_in_one_call(self) -> bool:
        """Whether the rows of all sequences attend in one call, unless they must be exact."""
        return self._static is not None

    @property
    def attends_with_amx(self) -> bool:
        """Whether all rows, at any shapes, attend in the processor's tiles (AMX)."""
        return self._attention is not None and self._attention.uses_amx

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], num_top: int = 1) -> list[NodeOutputs | None]:
        """Run the model once; the chunks' keys and values are in the cache afterwards.

        Args:
            num_top: the most likeliest tokens of every row that will be asked for, if any are.

        Returns:
            Per chunk the outputs at its tree's nodes and of its scored tokens; ``None`` for a chunk
            with neither.
        """
        batch = self._batch(chunks)
        for span in batch.plan.spans:
            self.cache.clear(span.padding)
        logits, hidden = self._run(batch)
        self._wait()  # so that timing a forward includes the device's work
        found = self._found(batch, logits)
        likeliest = None if found is None else found.likeliest
        packed = batch.packed
        top = TopTokens(logits, packed.num_nodes, num_top, likeliest)
        outputs = [
            None
            if chunk.tree is None
            else NodeOutputs(
                logits,
                top,
                part,
                None if found is None or chunk.race is None else found.drawn[part].tolist(),
                None if hidden is None else hidden[part],
            )
            for chunk, part in zip(chunks, packed.logit_slices, strict=True)
        ]
        for index, part in packed.scored_slices.items():
            nodes = outputs[index] or NodeOutputs(logits, top, slice(0))
            outputs[index] = nodes._replace(prompt_logits=logits[part].float())
        return outputs

    def _found(self, batch: ForwardBatch, logits: torch.Tensor) -> FoundTokens | None:
        """The tokens that the forward has found itself, if it has."""
        if self._choices is None or self.needs_hidden or batch.races is None or not len(logits):
            return None
        return self._choices.read(len(logits), batch.packed.num_nodes)

    def _wait(self) -> None:
        """Wait until the device has finished its work."""
        if self._is_gpu:
            torch.cuda.synchronize()

    def _batch(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        static, shapes = self._static, self.shapes
        if static is not None and not shapes.is_exact and static.fits(chunks):
            return static.build(chunks)
        return build_batch(chunks, self.cache, shapes, self._attention, self._workers)

    def _run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.needs_hidden:
            graphs = self._graphs
            logits = self._decoded(batch) if graphs is None else graphs(self._decoded, batch)
            return logits, None
        batch.send()
        output = self._output(batch)
        return rounded(output.logits[0]), output.hidden_states[-1][0, batch.logit_rows]

    def _decoded(self, batch: ForwardBatch) -> torch.Tensor:
        """The logits; where possible, the tokens found are already being sent to the host."""
        batch.send()
        logits = self._logits(batch)
        if self._choices is not None and batch.races is not None and len(logits):
            self._choices.send(logits, batch.races)
        return logits

    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        if self.compiled is not None:
            with running(batch.plan):
                return rounded(self.compiled(batch))
        return rounded(self._output(batch).logits[0])

    def _output(self, batch: ForwardBatch) -> Any:
        """The output of the model's own modules for ``batch``."""
        with running(batch.plan), _one_thread() if batch.plan.is_exact else nullcontext():
            return cast("Any", self.model.module)(
                input_ids=batch.token_ids[None],
                position_ids=batch.position_ids[None],
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                output_hidden_states=self.needs_hidden,
            )


def rounded(logits: torch.Tensor) -> torch.Tensor:
    """A model's logits in the dtype in which choices are made, bfloat16 or float32: the last bits
    of float64 depend on the order of sums, and must not matter."""
    return logits if logits.dtype is torch.bfloat16 else logits.float()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within it PyTorch uses one thread; our kernels, its workers, still use several.

    PyTorch splits an activation among threads regardless of where rows begin, and computes numbers
    next to a split by other instructions, whose last bit may differ.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)

"""The model as one compiled graph, with operators of ours: attention over packed trees, and linear
layers for few rows."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast
from weakref import ref

import torch
import torch._inductor.config
import torch.fx.experimental._config

from hdserve.engine.batch.forward_batch import ForwardBatch
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.forward.direct_graph import TOKEN_IDS, DirectGraph, names_of_inputs
from hdserve.engine.forward.graphs_by_rows import GraphsByRows, Run
from hdserve.engine.forward.unread_rows import OmitUnreadRows
from hdserve.engine.hardware.devices import has_amx_bf16
from hdserve.engine.linear.layers import set_native
from hdserve.engine.linear.multiply_together import MultiplyTogether
from hdserve.engine.linear.shared import is_plain, linear_layers_of
from hdserve.engine.native.compiler import find_compiler, vector_instructions
from hdserve.engine.native.declarations import declarations
from hdserve.engine.native.operators import load_operators


def _watched(guards: Sequence[Any]) -> list[bool]:
    """Which of the compiler's guards to keep: those on inputs and on PyTorch's own state.

    The modules never change.  Global state does: when transformers' table of attention functions
    grows, a guard on it would recompile the model during requests, and without its packed weights.
    """
    return [
        not guard.is_global and not guard.orig_guard.source.is_unspecialized_nn_module()
        for guard in guards
    ]


_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "compile_threads": 1,  # no process pool next to the replica
    }
)
"""Options of PyTorch's compiler."""

_CPU_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **_OPTIONS,
        "cpp_wrapper": True,  # saves 1 of 7.2 ms a row over a Python wrapper (docs/adr/0014)
        # What several loops read is computed once if it takes more operations than this: rows of an
        # embedding, sines and cosines of positions.
        "realize_opcount_threshold": 4,
    }
)
"""Options on a CPU, unless layers repeat.  A GPU has CUDA graphs instead, and a C++ wrapper would
need the CUDA headers there."""

_PACKING: Final[dict[str, Any]] = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",
}
"""Further options, by which the compiler multiplies in loops of its own, and stores weights in
the order in which the processor's tiles read them (docs/adr/0014)."""

_MAX_PACKED_BYTES = 1 << 31
"""The most bytes of weights that are packed, because packed weights are stored twice."""

_NATIVE_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **_CPU_OPTIONS,
        "aot_inductor.custom_ops_to_c_shims": declarations(),
        # Of tensors that the compiler or our operators have made; a tenth of a forward of one row.
        "size_asserts": False,
        "alignment_asserts": False,
    }
)
"""The same where operators are called without Python."""

_UNSHARED: Final[Mapping[str, Any]] = MappingProxyType({"cpp.threads": 1})
"""Further options for code that one thread runs, but for our operators."""

_MAX_UNSHARED_NUMBERS = 1 << 14
"""The most numbers, rows times the inputs of the widest linear layer, with which one thread takes
less time between our operators than several, which have to be told (docs/adr/0042)."""

_MIN_UNSHARED_ROWS, _MOST_UNSHARED_ROWS = 8, 48
"""If it is fewer rows, code for one thread is not worth its making.  It never serves more than the
latter, so that whoever tries whether forwards are exact
(:func:`~hdserve.engine.loading.exactness.find_exact_shapes`) tries both kinds of code."""

_SEVERAL_ROWS = 2
"""The fewest rows, and rows with logits, of a graph that is made for more than one row."""


def can_compile() -> bool:
    """Whether what makes a model's code is there: the C++ compiler, with which the C compiler comes
    that Triton needs on a GPU, and the headers of Python, which the code of both includes."""
    return find_compiler() is not None and Path(sysconfig.get_path("include"), "Python.h").exists()


def can_pack(module: torch.nn.Module) -> bool:
    """Whether the model's weights fit the processor's tiles (AMX), and PyTorch's compiler uses
    those, which takes seconds to find out once."""
    return fits_tiles(module) and "amx" in vector_instructions()


def fits_tiles(module: torch.nn.Module) -> bool:
    """Whether the processor has tiles (AMX), and all linear layers and few enough weights for
    them."""
    layers = [*linear_layers_of(module)]
    can_be = all(
        is_plain(layer) and has_amx_bf16(layer.weight.device, layer.weight.dtype)
        for layer in layers
    )
    return can_be and 0 < sum(layer.weight.nbytes for layer in layers) <= _MAX_PACKED_BYTES


class CompiledForward:
    """Runs the stock model compiled by ``torch.compile``: its many small steps become few.

    Numbers of rows and of logits are variables of the graph.  On a CPU one row is no special case:
    the same graph, with the same rounding, computes all forwards; of small models it is compiled
    once more for few rows, whose loops are not shared among threads.  On a GPU, and where operators
    run in Python, there is one graph for a single row and one for more.  A graph is made at its
    first use, which takes about a minute, or seconds if the code is in PyTorch's cache on disk.

    Args:
        module: a causal language model of transformers that attends by
            :func:`~hdserve.engine.attention.packed.packed_attention`.
        is_packed: whether the graph has its own copy of the weights, in another order; see
            :func:`can_pack`.  Such a graph has at least two rows.
        is_repeating: whether the code of one layer is made once for all; see
            :func:`~hdserve.engine.forward.repeated_layers.repeat_layers`.
        uses_native: ``False`` runs the operators in Python, as where no C++ ones exist.

    Attributes:
        is_native: whether all its linear layers are our kernels, called without Python.
        shapes: of its forwards.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        is_packed: bool = False,
        is_repeating: bool = False,
        uses_native: bool = True,
    ) -> None:
        self.is_packed = is_packed
        self.shapes = Shapes(min_rows=_SEVERAL_ROWS) if is_packed else Shapes()
        is_cpu = next(module.parameters()).device.type == "cpu"
        self._takes_one_row = is_cpu and not is_packed
        self._num_graphs = 0
        self._direct: DirectGraph | None = None
        self._known_sizes: set[tuple[int, int]] = set()
        """Numbers of rows and of logits for which compiled code has found the graph."""
        self._operators = load_operators() if uses_native and is_cpu else None
        self._options = _OPTIONS
        if is_cpu and not is_repeating:
            self._options = _CPU_OPTIONS if self._operators is None else _NATIVE_OPTIONS
        self.is_native = set_native(module, is_native=self._operators is not None)
        widest = max((layer.in_features for layer in linear_layers_of(module)), default=1)
        of_few = min(_MOST_UNSHARED_ROWS, _MAX_UNSHARED_NUMBERS // widest)
        self._max_unshared_rows = of_few if self.is_native else 0
        self._forward: Callable[..., torch.Tensor] = cast("Any", torch.compile)(
            _forward_of(module),
            dynamic=True,
            fullgraph=True,
            isolate_recompiles=True,
            backend=partial(_made_by, ref(self)),
            options={"guard_filter_fn": _watched},
        )

    def _make_graph(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Have PyTorch's own compiler make ``graph``, where that pays once more for few rows."""
        run = self._compiled(graph, inputs)
        names = names_of_inputs(graph)
        if self._max_unshared_rows >= _MIN_UNSHARED_ROWS and TOKEN_IDS in names:
            of_few = self._compiled(graph, inputs, **_UNSHARED)
            run = GraphsByRows(of_few, run, names.index(TOKEN_IDS), self._max_unshared_rows)
        self._num_graphs += 1
        self._direct = None
        if self._num_graphs == 1:
            takes_tensors = "cpp_wrapper" in self._options
            self._direct = DirectGraph.of(graph, inputs, run, takes_tensors=takes_tensors)
        self._known_sizes.clear()
        return run

    def _compiled(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Run:
        from torch._inductor.compile_fx import compile_fx  # takes two seconds to load

        options |= self._options
        return cast("Run", cast("Any", compile_fx)(graph, inputs, config_patches=options))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Enter this around forwards that may build graphs, in their thread.

        Layer numbers are compiled in as constants; else each would be turned into a tensor in every
        forward: 0.1 of the 0.7 ms that one row of hdserve-mini takes.
        """
        chosen = {"post_grad_custom_pre_pass": (OmitUnreadRows(), MultiplyTogether())}
        of_code = torch._inductor.config.patch(chosen | _PACKING if self.is_packed else chosen)
        sizes = cast("Any", torch.fx.experimental._config)
        of_sizes = sizes.patch(backed_size_oblivious=self._takes_one_row)
        with torch._dynamo.config.patch(specialize_float=True), of_code, of_sizes:
            yield

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The logits ``[n, vocab_size]`` of the batch's ``n`` logit rows; call it within
        :func:`~hdserve.engine.batch.step_context.running`."""
        rows = batch.logit_rows
        least = 1 if self._takes_one_row else min(_SEVERAL_ROWS, len(batch.token_ids))
        num_missing = least - len(rows)
        if num_missing > 0:
            rows = torch.cat([rows, rows.new_zeros(num_missing)])
        operators = self._operators
        with nullcontext() if operators is None else operators.running(batch.plan):
            logits = self._run(batch.token_ids, batch.position_ids, rows)
        return logits if num_missing <= 0 else logits[: len(batch.logit_rows)]

    def _run(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """The first forward of any size goes the long way, on which PyTorch looks whether its graph
        is for that size."""
        sizes = token_ids.shape[0], logit_rows.shape[0]
        if self._direct is not None and sizes in self._known_sizes:
            return self._direct(token_ids, position_ids, logit_rows)
        logits = self._forward(token_ids, position_ids, logit_rows)
        if self._direct is not None:
            self._known_sizes.add(sizes)
        return logits


def _made_by(owner: ref[CompiledForward], graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """The backend of ``torch.compile``, which PyTorch keeps for good, and so must not keep the
    owner, and with it a model."""
    compiled = owner()
    assert compiled is not None, "a graph is made while its owner runs a forward"
    return compiled._make_graph(graph, inputs)


def _forward_of(module: torch.nn.Module) -> Any:
    """The model's forward as a function of the rows, with a constant batch size of one."""
    model = cast("Any", module)

    def forward(
        token_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        output = model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        return cast("torch.Tensor", output.logits[0])

    return forward

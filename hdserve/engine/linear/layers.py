"""How the linear layers of a model are stored and multiplied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F

from hdserve.engine.hardware.kernel_choice import max_rows_faster
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.linear.choice import Kernel, kernels_of
from hdserve.engine.linear.gpu_skinny import use_gpu_skinny_linear
from hdserve.engine.linear.prepacked import PrepackedLinear
from hdserve.engine.linear.prepacked_layers import prepack_layers
from hdserve.engine.linear.shared import is_plain, linear_layers_of, replace_modules
from hdserve.engine.linear.skinny import ALL_ROWS, SkinnyLinear, multiply_rows

_MIN_MEAN_WEIGHTS = 1 << 19
"""If layers have more weights than this on average, the kernel is also used for one row.  Calling
it from Python takes about 10 us, in which a tenth as many weights are read."""

_MAX_COPIED_BYTES = 1 << 28
"""The most bytes of weights that are stored twice."""

_TRIED_COUNTS = (4, 8, 16, 32, 64, 128, 256)
_TRIED_WEIGHTS = 1 << 24
"""The most weights of the layers in a trial, so that it is short."""


def prepare_linear_layers(module: torch.nn.Module, is_exact: bool) -> None:
    """Have each layer multiplied by its kernel, in place: see :mod:`hdserve.engine.linear`."""
    kernels = kernels_of(module, is_exact=is_exact)
    if Kernel.GPU in kernels.values():
        use_gpu_skinny_linear(module)
        return
    prepack_layers(module, kernels)
    _use_skinny_linear(module, kernels, is_exact)


def _use_skinny_linear(
    module: torch.nn.Module, kernels: Mapping[torch.nn.Linear, Kernel], is_exact: bool
) -> None:
    """Replace the layers whose kernel is ``SKINNY``, on a CPU.

    Unless results must be exact, a trial finds for how many rows the kernel is used.  PyTorch
    multiplies float32 weights faster by column: if layers are small, they are copied in that order,
    and PyTorch computes one row and many; layers the kernel cannot speed up are stored by column
    only.
    """
    layers = [*filter(is_plain, linear_layers_of(module))]
    if not layers:
        return
    found = [layer for layer in layers if kernels.get(layer) is Kernel.SKINNY]
    own = _not_embedded(module, layers) if layers[0].weight.dtype == torch.float32 else []
    by_column = {}
    if not is_exact and _are_small(layers):
        copied = [layer for layer in own if layer in found]
        if sum(layer.weight.nbytes for layer in copied) > _MAX_COPIED_BYTES:
            _store_by_column(own)
            return
        by_column = {layer: _by_column(layer) for layer in copied}
    max_rows = _max_rows(found, by_column)
    replaced = dict[torch.nn.Module, torch.nn.Module]()
    if is_exact or max_rows:
        limit = torch.tensor(max_rows)
        replaced = {layer: SkinnyLinear(layer, limit, by_column.get(layer)) for layer in found}
    replace_modules(module, replaced)
    _store_by_column(layer for layer in own if layer not in replaced)


def set_native(module: torch.nn.Module, *, is_native: bool) -> bool:
    """Set whether compiled models call the kernel for one row too; return whether all linear layers
    use our kernels, called without Python."""
    layers = [*linear_layers_of(module)]
    for layer in layers:
        if isinstance(layer, SkinnyLinear):
            layer.is_native = is_native
    return is_native and all(isinstance(layer, SkinnyLinear | PrepackedLinear) for layer in layers)


def are_rows_independent(module: torch.nn.Module) -> bool:
    """Whether rows of a linear layer never depend on each other if shapes are exact: our kernels
    multiply all of them."""
    return all(
        isinstance(layer, PrepackedLinear)
        or (isinstance(layer, SkinnyLinear) and layer.by_column is None)
        for layer in linear_layers_of(module)
    )


def _are_small(layers: Sequence[torch.nn.Linear]) -> bool:
    """Whether PyTorch multiplies one row in less time than calling the kernel takes."""
    is_float32 = layers[0].weight.dtype == torch.float32
    num_weights = sum(layer.weight.numel() for layer in layers)
    return is_float32 and num_weights < _MIN_MEAN_WEIGHTS * len(layers)


@torch.inference_mode()
def _max_rows(
    layers: Iterable[torch.nn.Linear], by_column: dict[torch.nn.Linear, torch.Tensor]
) -> int:
    """The most rows for which the kernel is as fast as PyTorch, in a trial with some layers."""
    tried = [*_some(layers)]
    if not tried:
        return 0
    workers = Workers()
    dtype = tried[0].weight.dtype
    rows = {
        layer.in_features: torch.zeros((_TRIED_COUNTS[-1], layer.in_features), dtype=dtype)
        for layer in tried
    }

    def ours(count: int) -> None:
        for layer in tried:
            multiply_rows(rows[layer.in_features][:count], layer.weight, workers)

    def theirs(count: int) -> None:
        for layer in tried:
            weight = by_column.get(layer, layer.weight)
            F.linear(rows[layer.in_features][:count], weight)

    found = max_rows_faster(_TRIED_COUNTS, ours, theirs)
    return ALL_ROWS if found == _TRIED_COUNTS[-1] else found


def _some(layers: Iterable[torch.nn.Linear]) -> Iterator[torch.nn.Linear]:
    """The first layers, with few enough weights for a short trial and too many for the caches."""
    num_weights = 0
    for layer in layers:
        if num_weights and num_weights + layer.weight.numel() > _TRIED_WEIGHTS:
            return
        num_weights += layer.weight.numel()
        yield layer


def _not_embedded(
    module: torch.nn.Module, layers: Iterable[torch.nn.Linear]
) -> list[torch.nn.Linear]:
    """The layers that share no weights with an embedding, which reads rows (docs/adr/0014)."""
    embedded = {
        id(layer.weight) for layer in module.modules() if isinstance(layer, torch.nn.Embedding)
    }
    return [layer for layer in layers if id(layer.weight) not in embedded]


def _store_by_column(layers: Iterable[torch.nn.Linear]) -> None:
    for layer in layers:
        layer.weight.data = _by_column(layer)


def _by_column(layer: torch.nn.Linear) -> torch.Tensor:
    return layer.weight.data.t().contiguous().t()

"""Which kernel multiplies which layers of a model."""

from __future__ import annotations

import pytest
import torch

from hdserve.engine.forward.compiled import can_pack
from hdserve.engine.hardware.devices import has_amx_bf16
from hdserve.engine.linear import choice, prepacked, prepacked_layers
from hdserve.engine.linear.layers import (
    are_rows_independent,
    prepare_linear_layers,
    set_native,
)
from hdserve.engine.linear.prepacked import PrepackedLinear, prepacked_kernel
from hdserve.engine.linear.shared import replace_modules
from hdserve.engine.linear.skinny import SkinnyLinear
from tests.engine.linear.test_prepacked import needs_kernel
from tests.engine.linear.test_skinny import step


def layers_of(size: int, dtype: torch.dtype) -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(3)]).to(dtype)


@pytest.fixture
def without_prepacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors that have no kernel for it."""
    monkeypatch.setattr(choice, "can_prepack", lambda _layer: False)


@pytest.mark.usefixtures("without_prepacking")
def test_small_layers_are_stored_by_column() -> None:
    """As PyTorch multiplies one row faster; if the kernel is faster for more, a copy of them."""
    module = layers_of(64, torch.float32)
    prepare_linear_layers(module, is_exact=False)
    assert not are_rows_independent(module)
    for layer in module:
        is_copied = isinstance(layer, SkinnyLinear)
        stored = layer.by_column if is_copied else layer.weight
        assert stored.stride() == (1, 64)
        assert torch.equal(stored, layer.weight)


@pytest.mark.usefixtures("without_prepacking")
def test_an_embedding_is_not_transposed() -> None:
    """Its rows are read, whoever else multiplies by them."""
    module = layers_of(64, torch.float32)
    embedding = torch.nn.Embedding(64, 64)
    embedding.weight = module[1].weight
    module.append(embedding)
    prepare_linear_layers(module, is_exact=False)
    assert embedding.weight.stride() == (64, 1)
    assert module[1].weight is embedding.weight


@pytest.mark.usefixtures("without_prepacking")
@pytest.mark.parametrize("size", [64, 1024])
def test_exact_models_use_the_kernel_whatever_is_faster(size: int) -> None:
    module = layers_of(size, torch.float32)
    prepare_linear_layers(module, is_exact=True)
    assert are_rows_independent(module)
    assert module[0].weight.stride() == (size, 1)


@pytest.mark.usefixtures("without_prepacking")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_layers_are_tried(dtype: torch.dtype) -> None:
    """Whatever comes out, all layers are of one kind, and give what they gave to who calls them
    outside of a step."""
    module = layers_of(1024, dtype)
    rows = torch.randn(3, 1024).to(dtype)
    before = module(rows)
    prepare_linear_layers(module, is_exact=False)
    assert len({type(layer) for layer in module}) == 1
    if isinstance(module[0], SkinnyLinear):
        assert module[0].max_rows >= 4
    torch.testing.assert_close(module(rows), before, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_exact", [False, True])
def test_layers_are_prepacked_where_there_is_a_kernel_for_them(
    is_exact: bool, dtype: torch.dtype
) -> None:
    has_tiles = has_amx_bf16(torch.device("cpu"), dtype)
    is_faster = prepacked_kernel(dtype) is not None and (is_exact or not has_tiles)
    module = layers_of(128, dtype)
    module.append(torch.nn.Linear(128, 28).to(dtype))
    prepare_linear_layers(module, is_exact)
    assert are_rows_independent(module) or not is_exact
    *many, few = module
    assert not isinstance(few, PrepackedLinear)
    for layer in many:
        assert isinstance(layer, PrepackedLinear) == is_faster


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_weights_that_no_cache_holds_are_multiplied_on_any_processor(dtype: torch.dtype) -> None:
    module = torch.nn.Linear(4096, 8448, bias=False).to(dtype)
    rows = torch.randn(2, 4096).to(dtype)
    wanted = module(rows)
    model = torch.nn.Sequential(module)
    prepare_linear_layers(model, is_exact=True)
    assert are_rows_independent(model)
    with step(is_exact=True):
        torch.testing.assert_close(model(rows), wanted, atol=2e-2, rtol=2e-2)


def test_streams_are_tried_only_for_what_is_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried with the kernel, which the processor may not have."""

    def refuse(_num_bytes: int) -> int:
        pytest.fail("streams were tried")

    monkeypatch.setattr(prepacked_layers, "pick_num_streams", refuse)
    prepare_linear_layers(layers_of(64, torch.float64), is_exact=True)


def test_float64_and_layers_of_odd_sizes_are_left() -> None:
    for module in (layers_of(64, torch.float64), layers_of(1022, torch.bfloat16)):
        prepare_linear_layers(module, is_exact=True)
        assert not are_rows_independent(module)


def test_rows_are_their_own_where_the_kernel_multiplies_all_of_them() -> None:
    known = torch.nn.Linear(64, 20)
    model = torch.nn.Sequential(known, torch.nn.Sequential(known))
    assert not are_rows_independent(model)
    replace_modules(model, {known: SkinnyLinear(known, torch.tensor(32))})
    assert model[0] is model[1][0]
    assert are_rows_independent(model)
    model.append(SkinnyLinear(known, torch.tensor(32), known.weight.detach()))
    assert not are_rows_independent(model), "a single row is PyTorch's"


@needs_kernel
def test_nothing_is_unpacked_when_layers_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take as long as prepacking all of them."""

    def refuse(*_: object) -> torch.Tensor:
        pytest.fail("weights were unpacked")

    monkeypatch.setattr(prepacked, "unpack_weights", refuse)
    module = layers_of(128, torch.bfloat16)
    prepare_linear_layers(module, is_exact=True)
    assert all(isinstance(layer, PrepackedLinear) for layer in module)
    assert are_rows_independent(module)
    assert not can_pack(module)
    assert set_native(module, is_native=True)

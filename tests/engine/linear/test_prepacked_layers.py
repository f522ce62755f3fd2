"""Which weights of a model are prepacked, and that nobody misses them."""

from __future__ import annotations

import copy

import pytest
import torch

from hdserve.engine.linear import prepacked_layers
from hdserve.engine.linear.choice import kernels_of
from hdserve.engine.linear.prepacked import PrepackedLinear
from hdserve.engine.linear.prepacked_embedding import PrepackedEmbedding
from hdserve.engine.linear.prepacked_layers import prepack_layers
from tests.engine.linear.test_prepacked import needs_kernel

pytestmark = needs_kernel


class OtherEmbedding(torch.nn.Embedding):
    """That may do anything beside reading rows."""


def prepack_all(model: torch.nn.Module) -> None:
    """Whatever can be prepacked."""
    prepack_layers(model, kernels_of(model, is_exact=True))


def make_model(
    vocab_size: int = 128, embedding: type[torch.nn.Embedding] = torch.nn.Embedding
) -> torch.nn.Sequential:
    """An embedding, a layer with a bias, and a head that may have the weights of the embedding."""
    model = torch.nn.Sequential(
        embedding(vocab_size, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, vocab_size, False)
    )
    return model.bfloat16().requires_grad_(False)


def tied(model: torch.nn.Sequential) -> torch.nn.Sequential:
    model[2].weight = model[0].weight
    return model


def num_stored_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("is_tied", [False, True])
@torch.inference_mode()
def test_weights_are_stored_once_and_say_the_same(is_tied: bool) -> None:
    model = tied(make_model()) if is_tied else make_model()
    num_bytes, before = num_stored_bytes(model), copy.deepcopy(model)
    prepack_all(model)
    assert isinstance(model[0], PrepackedEmbedding if is_tied else torch.nn.Embedding)
    assert all(isinstance(layer, PrepackedLinear) for layer in model[1:])
    assert num_stored_bytes(model) == num_bytes
    token_ids = torch.arange(128)
    torch.testing.assert_close(model(token_ids), before(token_ids), atol=2e-2, rtol=2e-2)
    for layer, other in zip(model, before, strict=True):
        assert torch.equal(layer.weight, other.weight)


@pytest.mark.parametrize("num_streams", [1, 2])
@torch.inference_mode()
def test_weights_are_in_as_many_streams_as_are_best_for_so_many_bytes(
    monkeypatch: pytest.MonkeyPatch, num_streams: int
) -> None:
    """Those that layers share count once."""
    asked = []

    def pick(num_bytes: int) -> int:
        asked.append(num_bytes)
        return num_streams

    monkeypatch.setattr(prepacked_layers, "pick_num_streams", pick)
    model = tied(make_model())
    before = copy.deepcopy(model)
    prepack_all(model)
    assert asked == [24_576]
    assert all(each.prepacked.shape[1] == num_streams for each in model[1:])
    token_ids = torch.arange(128)
    assert torch.equal(model[0](token_ids), before[0](token_ids))
    torch.testing.assert_close(model(token_ids), before(token_ids), atol=2e-2, rtol=2e-2)


def test_prepacked_layers_are_not_prepacked_again() -> None:
    model = make_model()
    prepack_all(model)
    layers = [*model]
    prepack_all(model)
    assert [*model] == layers
    assert layers[1]._rows is None, "nobody asked for weights in the order of PyTorch"


def test_whoever_holds_the_weights_of_before_holds_no_memory() -> None:
    """A model is never in memory twice."""
    model = make_model()
    weights = [layer.weight for layer in model[1:]]
    prepack_all(model)
    assert all(weight.numel() == 0 for weight in weights)


@pytest.mark.parametrize("vocab_size", [80, 100, 127])
@torch.inference_mode()
def test_a_tied_head_may_have_a_vocabulary_that_is_no_multiple_of_a_block(vocab_size: int) -> None:
    model = tied(make_model(vocab_size))
    before = copy.deepcopy(model)
    prepack_all(model)
    assert isinstance(model[0], PrepackedEmbedding)
    token_ids = torch.arange(vocab_size)
    assert torch.equal(model[0](token_ids), before[0](token_ids))
    torch.testing.assert_close(model(token_ids), before(token_ids), atol=2e-2, rtol=2e-2)


def test_shared_weights_are_left_where_not_all_can_do_with_prepacked_ones() -> None:
    embedding, _, head = model = tied(make_model(embedding=OtherEmbedding))
    prepack_all(model)
    assert model[0] is embedding
    assert model[2] is head
    assert head.weight is embedding.weight
    assert isinstance(model[1], PrepackedLinear)


def test_an_embedding_that_renews_its_rows_keeps_them() -> None:
    model = tied(make_model())
    model[0].max_norm = 1.0
    prepack_all(model)
    assert model[2].weight is model[0].weight


def test_weights_of_several_layers_are_left() -> None:
    model = make_model()
    model.append(torch.nn.Linear(64, 64, bias=False))
    model[3].weight = model[1].weight
    prepack_all(model)
    assert model[3].weight is model[1].weight
    assert isinstance(model[2], PrepackedLinear)


def test_a_layer_in_two_places_stays_one() -> None:
    model = make_model()
    model.append(model[1])
    prepack_all(model)
    assert model[3] is model[1]
    assert isinstance(model[1], PrepackedLinear)

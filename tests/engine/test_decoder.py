"""What a decoder tells of its choices, and which of them may be made with those of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdserve.core import SamplingParams, Sequence, Source
from hdserve.engine.decoder import SequenceDecoder
from hdserve.engine.forward.node_outputs import NodeOutputs, TopTokens
from hdserve.engine.sampling.batched_choices import choose_together
from hdserve.engine.sampling.logits_processor import LogitsProcessor, seen_tokens
from hdserve.engine.sampling.logprobs import chosen_logprobs
from hdserve.tree import DraftTree

NUM_NODES, VOCAB_SIZE = 5, 61


def make_decoder(**params: Any) -> SequenceDecoder:
    seq = Sequence("a", [5, 9, 11], SamplingParams(**params))
    seq.max_total_tokens = 100
    return SequenceDecoder(seq, frozenset())


def make_logits() -> torch.Tensor:
    return 3.0 * torch.randn((NUM_NODES, VOCAB_SIZE), generator=torch.Generator().manual_seed(2))


def make_outputs(logits: torch.Tensor, top: TopTokens | None = None) -> NodeOutputs:
    return NodeOutputs(logits, top or TopTokens(logits, len(logits)), slice(0, len(logits)))


def path_of(token_ids: list[int]) -> DraftTree:
    """A tree that guesses all of ``token_ids``, one after the other."""
    tree = DraftTree(11, len(token_ids))
    for parent, token_id in enumerate(token_ids):
        tree.add_node(parent, token_id, Source.CONTEXT)
    return tree


def whole_path(outputs: NodeOutputs, **params: Any) -> DraftTree:
    """A tree of which everything is accepted."""
    token_ids: list[int] = []
    for _ in range(NUM_NODES - 1):
        token_ids = [*make_decoder(**params).decide(path_of(token_ids), outputs).token_ids]
    return path_of(token_ids)


@pytest.mark.parametrize("num_top", [0, 3, 20])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"seed": 3}, {"seed": 3, "top_k": 7, "temperature": 0.8}]
)
def test_log_probabilities_are_of_what_was_chosen(num_top: int, params: dict[str, Any]) -> None:
    """Of raw logits; what is sampled may be chosen with what others sample, as without them."""
    outputs = make_outputs(make_logits())
    tree = whole_path(outputs, **params)
    wanted = make_decoder(**params).decide(tree, outputs)
    assert wanted.path == [*range(NUM_NODES)]
    decoder = make_decoder(**params, logprobs=num_top)
    nodes = decoder.nodes(tree, outputs)
    assert (nodes is None) == (params.get("temperature") == 0.0)
    drawn = None if nodes is None else choose_together([nodes])[0]
    acceptance = decoder.decide(tree, outputs._replace(drawn=drawn))
    assert acceptance == wanted
    _, output = decoder.commit(tree, acceptance)
    scores = chosen_logprobs(outputs.logits, wanted.token_ids, num_top)
    assert output.logprobs == (*scores,)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 3}])
@pytest.mark.parametrize("min_tokens", [2, 4])
def test_choices_are_free_after_min_tokens(params: dict[str, Any], min_tokens: int) -> None:
    """Unless something else depends on the tokens before, they are those of the logits alone."""
    outputs = make_outputs(make_logits())
    root = DraftTree(11, 0)
    for lasting, stays in (({}, False), ({"presence_penalty": 0.5}, True)):
        decoder = make_decoder(**params, **lasting, min_tokens=min_tokens)
        seen = seen_tokens(decoder.seq.params, decoder.seq.token_ids)
        decoder.logits_processor = LogitsProcessor(
            decoder.seq.params, seen, [7], VOCAB_SIZE, torch.device("cpu")
        )
        for number in range(min_tokens):
            assert decoder.logits_processor is not None, number
            decoder.commit(root, decoder.decide(root, outputs))
        assert (decoder.logits_processor is not None) == stays


def test_the_likeliest_is_not_looked_for_again() -> None:
    """A greedy choice with log probabilities is what is known of the whole forward."""
    logits = make_logits()
    known = torch.arange(NUM_NODES)[:, None].numpy(), torch.ones((NUM_NODES, 1)).numpy()
    outputs = make_outputs(logits, TopTokens(logits, NUM_NODES, found=known))
    decoder = make_decoder(temperature=0.0, logprobs=1)
    assert decoder.decide(path_of([0, 1]), outputs).token_ids == [0, 1, 2]

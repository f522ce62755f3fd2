"""Engines around tiny models, and ways to run them, for the tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from hdserve import core
from hdserve.config import DraftingConfig, EngineConfig, ModelConfig
from hdserve.core import SamplingParams, StepOutput
from hdserve.drafting.base import Drafter
from hdserve.engine.build import build_engine
from hdserve.engine.engine import Engine
from hdserve.engine.loading.compilation import CompilationResult
from hdserve.engine.loading.loader import prepare_model
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.tokenization.tokenizer import Tokenizer
from tests.models import VOCAB_SIZE, make_model


def make_engine(
    drafters: Iterable[Drafter] = (),
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Tokenizer | None = None,
    max_draft_tokens: int = 12,
    adapts_budget: bool = False,
    grammars: Grammars | None = None,
    compilation: Future[CompilationResult] | None = None,
    attends_in_one_call: bool | None = None,
    **engine_options: Any,
) -> Engine:
    """An engine in float64 around a tiny Llama, or around ``model``; not exact unless told so: the
    forwards of an engine that tries what that costs would be others from run to run."""
    defaults = {"exact": False, "kv_cache_tokens": 2048, "prefill_chunk_tokens": 16}
    config = ModelConfig(
        name="test",
        model="test",
        engine=EngineConfig(**{**defaults, **engine_options}),
        drafting=DraftingConfig(max_draft_tokens=max_draft_tokens, adapts_budget=adapts_budget),
    )
    loaded = prepare_model(model if model is not None else make_model(), config.engine)
    if tokenizer is not None and grammars is None:
        grammars = Grammars(tokenizer, loaded.vocab_size, loaded.eos_token_ids)
    return build_engine(
        config,
        loaded,
        tuple(drafters),
        tokenizer,
        grammars=grammars,
        start_compilation=None if compilation is None else lambda *_: compilation,
        attends_in_one_call=attends_in_one_call,
    )


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def make_sequence(
    name: str, prompt: list[int], speculation: core.SpeculationParams | None = None, **params: Any
) -> core.Sequence:
    """A sequence of 24 output tokens unless ``params`` say otherwise."""
    options = {"max_tokens": 24, **params}
    return core.Sequence(
        name,
        list(prompt),
        SamplingParams(**options),
        speculation or core.SpeculationParams(),
    )


def run(engine: Engine, sequences: Sequence[core.Sequence]) -> list[StepOutput]:
    """Decode ``sequences`` together to their ends; every output in order."""
    for seq in sequences:
        engine.add(seq)
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def plain_tokens(
    model: torch.nn.Module, sequences: Iterable[core.Sequence], **engine_options: Any
) -> dict[str, list[int]]:
    """The full token ids of each sequence when it is decoded alone and without drafts."""
    engine = make_engine(model=model, **engine_options)
    found = {}
    for seq in sequences:
        alone = core.Sequence(
            seq.request_id,
            list(seq.token_ids),
            seq.params,
            choice_index=seq.choice_index,
        )
        run(engine, [alone])
        found[seq.request_id] = alone.token_ids
    return found

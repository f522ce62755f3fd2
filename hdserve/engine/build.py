"""From a model's configuration to a running engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import torch

from hdserve import core
from hdserve.config import EngineConfig, ModelConfig
from hdserve.drafting.base import Drafter
from hdserve.drafting.budget import DraftBudget
from hdserve.drafting.guarded import GuardedDrafters
from hdserve.engine.decoder_factory import DecoderFactory
from hdserve.engine.engine import Engine
from hdserve.engine.forward.compiled import CompiledForward, can_pack
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.forward.model_runner import ModelRunner, rounded
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.prefix_cache import PrefixCache
from hdserve.engine.loading.cache_size import make_cache
from hdserve.engine.loading.compilation import StartCompilation
from hdserve.engine.loading.exactness import choose_shapes
from hdserve.engine.loading.forward_cost import measure_forward_cost
from hdserve.engine.loading.model_check import check_packed_forward
from hdserve.engine.sampling.sampler import choose_one
from hdserve.engine.scheduling.prefill_pace import PrefillPace
from hdserve.engine.scheduling.scheduler import MAX_CHUNK_SCORES, Scheduler
from hdserve.engine.scheduling.step_drafts import StepDrafts
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.tokenization.tokenizer import Tokenizer
from hdserve.errors import UnequalResults

logger = logging.getLogger(__name__)

_MAX_PROMPT_LOGITS = 1 << 24
"""The most logits of prompt tokens in one step: 64 MiB in float32."""


def build_engine(
    config: ModelConfig,
    model: LoadedModel,
    drafters: tuple[Drafter, ...],
    tokenizer: Tokenizer | None = None,
    *,
    grammars: Grammars | None = None,
    on_finish: Callable[[core.Sequence], None] | None = None,
    compiled: CompiledForward | None = None,
    start_compilation: StartCompilation | None = None,
    attends_in_one_call: bool | None = None,
    is_exact: bool | None = None,
    memory_share: float = 1.0,
) -> Engine:
    """Make the engine of one replica around a loaded model.

    Args:
        compiled: the model, if it has been compiled.
        start_compilation: compiles the model in the background while first requests are answered;
            not used where exact answers are required and hold: compiled ones could differ.
        attends_in_one_call: see :class:`~hdserve.engine.forward.model_runner.ModelRunner`.
        is_exact: whether answers are exact, if another engine for the same model has already
            measured what that costs; ``None`` follows the configuration.
        memory_share: see :func:`~hdserve.engine.loading.cache_size.make_cache`.

    Raises:
        ConfigError: the KV cache is too small or does not fit into memory, or forwards do not fit
            besides it; or exact answers are required and impossible.
        UnsupportedModel: the model gives different results in packed forwards.
    """
    drafting = config.drafting
    max_draft_tokens = drafting.most_draft_tokens(model.device.type) if drafters else 0
    guarded = GuardedDrafters(drafters, model.vocab_size)
    guarded.warm_up()
    cache = make_cache(config, model, max_draft_tokens, memory_share)
    runner = ModelRunner(
        model,
        cache,
        needs_hidden=guarded.needs_hidden,
        max_draft_tokens=max_draft_tokens,
        attends_in_one_call=attends_in_one_call,
    )
    exact = config.engine.exact if is_exact is None else is_exact
    chunk_tokens = config.engine.most_prefill_tokens(model.weight_bytes, model.device.type)
    max_rows = config.engine.max_num_sequences * (1 + max_draft_tokens) + chunk_tokens
    _prepare(runner, compiled, max_rows, exact)
    budget = _make_budget(config, runner, max_draft_tokens)
    _log_engine(config, model, cache)
    compilation = None
    if start_compilation is not None and _may_switch_to_compiled(runner, config.engine):
        rows = 1 + max_draft_tokens, max_rows, cache.num_rows
        compilation = start_compilation(model, config.engine, *rows, budget is not None)
    drafts = StepDrafts(
        guarded,
        budget,
        max_draft_tokens,
        min(drafting.most_depth(max_draft_tokens), runner.max_depth),
        may_follow_prompts=runner.rounds_alike,
    )
    scheduler = _make_scheduler(config.engine, runner, max_draft_tokens, chunk_tokens)
    max_total_tokens = min(model.max_model_len, scheduler.max_total_tokens)
    backend = None if tokenizer is None else tokenizer.backend
    factory = DecoderFactory(model, max_total_tokens, backend, grammars)
    return Engine(runner, scheduler, drafts, factory, on_finish=on_finish, compilation=compilation)


def _make_budget(
    config: ModelConfig, runner: ModelRunner, max_draft_tokens: int
) -> DraftBudget | None:
    """Measure what forwards cost; ``None`` if trees are verified whole or never drafted."""
    if not (config.drafting.adapts_budget and max_draft_tokens):
        return None
    budget = DraftBudget(
        measure_forward_cost(runner, 1 + max_draft_tokens, config.engine.max_num_sequences)
    )
    budget.warm_up()
    return budget


def _log_engine(config: ModelConfig, model: LoadedModel, cache: KVCache) -> None:
    logger.info(
        "%s: %s on %s, %d threads, %d slots, %d KV tokens",
        config.name,
        str(model.dtype).removeprefix("torch."),
        model.device,
        torch.get_num_threads(),
        config.engine.max_num_sequences,
        cache.num_rows,
    )


def _prepare(
    runner: ModelRunner,
    compiled: CompiledForward | None,
    max_rows: int,
    exact: bool | Literal["auto"],
) -> None:
    """Check the model, and choose how its forwards run.

    Args:
        max_rows: of the largest forward.

    Raises:
        ConfigError: the largest forward does not fit a GPU, or exact answers are impossible.
        UnsupportedModel: the model gives different results in packed forwards.
    """
    if compiled is not None and runner.needs_hidden:
        logger.warning("the model runs uncompiled: a drafter reads its hidden states")
    runner.compile_with(None if runner.needs_hidden else compiled)
    runner.warm_up(max_rows)
    _check(runner, max_rows)
    _compile_kernels(runner)
    runner.shapes = choose_shapes(runner, max_rows, exact)


def _check(runner: ModelRunner, max_rows: int) -> None:
    """
    Args:
        max_rows: of the largest forward.

    Raises:
        ConfigError: the largest forward does not fit a GPU without kernels that were given up.
        UnsupportedModel: the model cannot be served, or gives different results in packed forwards
            with any attention.
    """
    try:
        check_packed_forward(runner)
    except UnequalResults as error:
        if not runner.attends_in_one_call:
            raise
        runner.fall_back(str(error))
        runner.warm_up(max_rows)
        _check(runner, max_rows)


def _may_switch_to_compiled(runner: ModelRunner, config: EngineConfig) -> bool:
    """Whether the model may be compiled while it answers: not where exact answers are required and
    hold, unless compiling keeps them the same."""
    stays_as_it_is = config.exact is True and runner.shapes.is_exact
    return not runner.needs_hidden and (not stays_as_it_is or can_pack(runner.model.module))


def _make_scheduler(
    config: EngineConfig, runner: ModelRunner, max_draft_tokens: int, chunk_tokens: int
) -> Scheduler:
    makes_masks = not runner.attends_in_one_call or runner.shapes.is_exact
    return Scheduler(
        PrefixCache(runner.cache, config.prefix_caching),
        max_num_sequences=config.max_num_sequences,
        pace=PrefillPace(chunk_tokens, config.prefill_slowdown),
        max_draft_tokens=max_draft_tokens,
        max_scored_tokens=max(1, _MAX_PROMPT_LOGITS // runner.model.vocab_size),
        shapes=runner.static_shapes,
        max_chunk_scores=MAX_CHUNK_SCORES if makes_masks else None,
    )


def _compile_kernels(runner: ModelRunner) -> None:
    """Compile, or load, the kernels that forwards do not call, before a request waits for them."""
    scratch_row = runner.cache.scratch_row
    runner.cache.keep([(scratch_row, scratch_row)])
    logits = torch.zeros((1, runner.model.vocab_size), device=runner.model.device)
    for each in (logits, rounded(logits.to(runner.model.dtype))):  # with penalties, and raw
        choose_one(each, core.SamplingParams(temperature=1.0), 0)

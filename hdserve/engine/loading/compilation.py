"""Compiling a model: before the first request, or in the background of the first ones."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch

from hdserve.config import EngineConfig
from hdserve.core import Source
from hdserve.drafting.batch_cost import BatchCost
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.forward.compiled import CompiledForward, can_pack
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.forward.repeated_layers import repeat_layers, should_repeat, unroll_layers
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import Segment
from hdserve.engine.loading.exactness import choose_shapes
from hdserve.engine.loading.forward_cost import measure_forward_cost, num_rows_to_measure
from hdserve.engine.loading.model_check import relative_errors, tolerance, trial_text
from hdserve.engine.native.compiler import find_compiler, spaced_directories, vector_instructions
from hdserve.errors import UnsupportedModel
from hdserve.tree import DraftTree

logger = logging.getLogger(__name__)

_NUM_CACHE_ROWS = 64
_NUM_TRIAL_ROWS = 512
_NUM_CACHED_TOKENS = 12


@dataclass(frozen=True, slots=True)
class CompilationResult:
    """What an engine can switch to between two steps.

    Attributes:
        shapes: of its forwards.
        cost: of its forwards; ``None`` if it was not measured.
    """

    compiled: CompiledForward
    shapes: Shapes
    cost: BatchCost | None


StartCompilation = Callable[
    [LoadedModel, EngineConfig, int, int, int, bool], Future[CompilationResult]
]
"""See :func:`compile_in_background`."""


def compile_model(
    model: LoadedModel, *, uses_native: bool = True, is_repeating: bool | None = None
) -> CompiledForward:
    """Compile ``model`` for any number of rows, and compare its results with those uncompiled.

    Does not change what the model computes, so an engine may be running it meanwhile.

    Args:
        uses_native: see :class:`~hdserve.engine.forward.compiled.CompiledForward`.
        is_repeating: whether one layer's code is to serve all layers where that is possible; by
            default as :func:`~hdserve.engine.forward.repeated_layers.should_repeat` says.

    Raises:
        UnsupportedModel: it cannot be compiled, or gives different results compiled.
    """
    has_compiler = model.device.type == "cpu" and find_compiler() is not None
    if has_compiler and not vector_instructions():
        logger.warning("%s", _what_is_wrong())
    is_packed = can_pack(model.module)
    if is_repeating is None:
        is_repeating = not is_packed and should_repeat(model.module)
    if is_repeating:
        repeat_layers(model.module)
        try:
            return _compile(model, is_repeating=True, uses_native=uses_native)
        except UnsupportedModel as error:
            logger.warning(
                "one layer's compiled code cannot be reused for all layers, compiling each: %s",
                error,
            )
    unroll_layers(model.module)
    return _compile(model, is_packed=is_packed, uses_native=uses_native)


def _what_is_wrong() -> str:
    """Why there may be no vector instructions in compiled code."""
    if spaced := spaced_directories():
        return f"PyTorch's compiler cannot use paths with spaces: {', '.join(spaced)}"
    return (
        "PyTorch's compiler finds no vector instructions that it can use, so compiled code is "
        f"slow: the processor has none that it knows, or {sys.executable} cannot start or load "
        "what it tries them with"
    )


def _compile(model: LoadedModel, **options: bool) -> CompiledForward:
    started = time.monotonic()
    name = type(model.module).__name__
    compiled = CompiledForward(model.module, **options)
    try:
        with compiled.compiling():
            difference = _difference(model, compiled)
    except Exception as error:  # compilers raise anything
        raise UnsupportedModel(f"{name} cannot be compiled: {error}") from error
    if difference > tolerance(model.dtype):
        raise UnsupportedModel(f"{name} gives different results compiled (by {difference:.1%})")
    logger.info("compiled %s in %.0f s", name, time.monotonic() - started)
    return compiled


def compile_in_background(
    model: LoadedModel,
    config: EngineConfig,
    num_tree_rows: int,
    max_rows: int,
    max_cache_rows: int,
    measures_cost: bool,
) -> Future[CompilationResult]:
    """Compile in a separate thread, find out whether forwards are then exact, and measure what
    they cost.

    Call it before the engine runs forwards.

    Args:
        num_tree_rows: of the largest draft tree.
        max_rows: of the largest forward.
        max_cache_rows: of the cache that forwards are measured with, unless those that are compared
            need more.
    """
    _trace_beforehand()
    found: Future[CompilationResult] = Future()
    num_threads = torch.get_num_threads()

    def run() -> None:
        try:
            torch.set_num_threads(num_threads)  # each thread has its own setting
            compiled = compile_model(model)
            number = config.max_num_sequences
            num_rows = min(num_rows_to_measure(num_tree_rows, number), max_cache_rows)
            runner = _runner(model, max(num_rows, _NUM_TRIAL_ROWS))
            runner.compile_with(compiled)
            if compiled.is_packed or compiled.is_native:
                runner.shapes = choose_shapes(runner, max_rows, config.exact)
            cost = None
            if measures_cost:
                cost = measure_forward_cost(runner, num_tree_rows, number)
            found.set_result(CompilationResult(compiled, runner.shapes, cost))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=run, name="hdserve-compile", daemon=True).start()
    return found


def _trace_beforehand() -> None:
    """Trace now what PyTorch's compiler would trace later by replacing ``Module.__call__`` for some
    milliseconds: a forward running in another thread at that time would fail."""
    with suppress(AttributeError, ImportError):  # in other versions of PyTorch
        from torch._inductor.loop_body import InterpreterShim  # takes seconds to load

        cast("Any", InterpreterShim)._dummy_gm()


def _runner(model: LoadedModel, num_rows: int) -> ModelRunner:
    """A runner with a small cache of its own, whose attention is not compiled."""
    cache = KVCache(model.kv_shape, num_rows, model.dtype, model.device)
    return ModelRunner(model, cache, attends_in_one_call=False)


def _difference(model: LoadedModel, compiled: CompiledForward) -> float:
    """By how much the logits differ, relative to their own spread, in a prompt, in a tree and in a
    single row."""
    runner = _runner(model, _NUM_CACHE_ROWS)
    segment = Segment(0, _NUM_CACHE_ROWS)
    tree = DraftTree(5 % model.vocab_size, 3)
    tree.add_path([1, 2, 3], Source.OTHER)
    num_cached = max(1, min(_NUM_CACHED_TOKENS, model.max_model_len - len(tree)))
    prompt = trial_text(num_cached, model.vocab_size)
    root = tree.token_ids[0]
    work = [
        Chunk(segment, 0, prompt, DraftTree(prompt[-1], 0)),
        Chunk(segment, num_cached, [root], tree),
        Chunk(segment, num_cached, [root], DraftTree(root, 0)),
    ]
    differences: list[float] = []
    for chunk in work:
        logits = []
        for forward in (None, compiled):
            runner.compile_with(forward)
            (outputs,) = runner.forward([chunk])
            assert outputs is not None
            logits.append(outputs.logits.float())
        plain, found = logits
        differences += relative_errors(found, plain).tolist()
    return max(differences, default=0.0)

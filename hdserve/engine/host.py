"""One model with everything it needs to answer, without Ray: the inside of a replica."""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch

from hdserve import core
from hdserve.config import ModelConfig
from hdserve.core import SamplingParams
from hdserve.databases.model import ModelDatabase, TokenIds
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_info import read_info
from hdserve.drafting.base import DraftResources
from hdserve.drafting.registry import build_drafters, check_drafters
from hdserve.engine.build import build_engine
from hdserve.engine.engine import Engine
from hdserve.engine.forward.compiled import CompiledForward, can_compile
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.hardware.cpu_count import available_cpus
from hdserve.engine.hardware.workers import end_own_threads
from hdserve.engine.kv_cache.prefix_cache import KeyedTokens
from hdserve.engine.loading.compilation import compile_in_background, compile_model
from hdserve.engine.loading.loader import load_model, read_architecture
from hdserve.engine.sampling.allowed_tokens import AllowedTokens
from hdserve.engine.sampling.logits_processor import seen_tokens
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.tokenization.tokenizer import Tokenizer, load_tokenizer
from hdserve.errors import ConfigError, SnapshotError, UnsupportedModel
from hdserve.models import bundled_statistics

logger = logging.getLogger(__name__)

BUNDLED_STATISTICS = "bundled"

LocateStatistics = Callable[[Iterable[Path], str], Path | None]
"""Picks a statistics database for a tokenizer fingerprint."""

OnOutput = Callable[[str, list[int]], None]

BetweenSteps = Callable[[Callable[[Engine], None]], None]
"""Has something run in the engine's thread between two steps, when there is time."""


def first_directory(directories: Iterable[Path], _fingerprint: str) -> Path | None:
    """The first directory that exists."""
    return next((directory for directory in directories if os.path.isdir(directory)), None)


class ModelHost:
    """A loaded model, its tokenizer, its drafters and their databases.

    The databases are owned by the thread that owns the engine, once there is one.

    Args:
        model: used instead of the one that the configuration names.
        max_database_bytes: limit of the model database, and of each one drafted from.
        num_threads: threads of the CPU kernels if the configuration does not say.
        locate_statistics: picks the statistics database to map among the directories of the
            configuration.
        on_output: called with the namespace and the token ids of every output that may be shared;
            runs in the engine's thread, so it must not block.
        between_steps: has outputs that ended added to the model database; without it they are added
            at once, which takes half a second where 64 outputs of 8,192 tokens end together.
        is_server: whether it lives long enough for compiling the model in the background of the
            first requests.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        model: LoadedModel | None = None,
        max_database_bytes: int = 256 * 2**20,
        num_threads: int | None = None,
        locate_statistics: LocateStatistics = first_directory,
        on_output: OnOutput | None = None,
        between_steps: BetweenSteps | None = None,
        is_server: bool = False,
    ) -> None:
        check_drafters(config.drafting)  # before minutes of loading
        _check_compiler(config.engine.compile)
        threads = config.engine.num_threads or num_threads
        self.num_threads = threads or min(torch.get_num_threads(), available_cpus())
        """Threads of the CPU kernels."""
        self.use_own_num_threads()
        self.config = config
        self.tokenizer = _load_tokenizer(config)
        self.model = _ending_with(model or load_model(config), self.tokenizer.eos_token_id)
        self.max_total_tokens = self.model.max_model_len
        """Longest prompt and output together: the model's limit, or less once an engine has a
        smaller cache."""
        self.grammars = Grammars(self.tokenizer, self.model.vocab_size, self.model.eos_token_ids)
        self._locate_statistics = locate_statistics
        self.statistics = self._open_statistics(logging.ERROR)
        self._on_output = on_output
        self._between_steps = between_steps
        self._ended: deque[core.Sequence] = deque()
        """Sequences that are still to be added to the model database."""
        self._is_server = is_server
        self._compiled: CompiledForward | None = None
        self._is_exact: bool | None = None
        self.databases = {
            name: ModelDatabase(max_database_bytes) for name in (config.name, *config.draft_from)
        }
        end_own_threads()

    @property
    def device_name(self) -> str:
        """The name of the GPU, or ``cpu``."""
        device = self.model.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

    @property
    def own_database(self) -> ModelDatabase:
        """What this model generated before."""
        return self.databases[self.config.name]

    def use_own_num_threads(self) -> None:
        """Let PyTorch use this model's number of threads, in this thread, where another model may
        have used its own."""
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)

    def make_engine(self, *, is_drafting: bool = True, memory_share: float = 1.0) -> Engine:
        """A new engine around the model and its databases; call it in the engine's thread.

        Either all engines begin exact or none: the cost is measured for the first only, as repeated
        measurements may disagree.

        Args:
            is_drafting: ``False`` makes an engine that never drafts.
            memory_share: the part of a GPU's free memory that it may take, where others will be
                made beside it.
        """
        self.use_own_num_threads()
        own, *others = self.databases.values()
        resources = DraftResources(
            vocab_size=self.model.vocab_size,
            model_database=own,
            statistics=self.statistics,
            draft_from=tuple(others),
            ending_token_ids=self.model.eos_token_ids,
            shares_output=self.config.share_output,
        )
        drafters = build_drafters(self.config.drafting, resources) if is_drafting else ()
        if self._compiled is None:
            self._compiled = self._compile()
        engine = build_engine(
            self.config,
            self.model,
            drafters,
            self.tokenizer,
            grammars=self.grammars,
            on_finish=self._record,
            compiled=self._compiled,
            start_compilation=compile_in_background
            if self._may_compile and self._is_on_cpu
            else None,
            is_exact=self._is_exact,
            memory_share=memory_share,
        )
        self._is_exact = engine.is_exact
        self.max_total_tokens = min(self.max_total_tokens, engine.max_total_tokens)
        end_own_threads()  # they would distort the measurements of the compiled model
        return engine

    @property
    def _is_on_cpu(self) -> bool:
        return self.model.device.type == "cpu"

    @property
    def _may_compile(self) -> bool:
        return self.config.engine.compile == "auto" and self._is_server and can_compile()

    def _compile(self) -> CompiledForward | None:
        """The model compiled before the first request, if it is to be: on a GPU always, because
        there CUDA graphs cannot be captured while requests run.

        Raises:
            UnsupportedModel: it must be compiled but cannot be.
        """
        if self.config.engine.compile is True:
            return compile_model(self.model)
        if self._is_on_cpu or not self._may_compile:
            return None
        try:
            return compile_model(self.model)
        except UnsupportedModel as error:
            logger.warning("the model stays uncompiled: %s", error)
            return None

    def apply(self, model: str, namespace: str, outputs: Sequence[TokenIds]) -> None:
        """Add outputs of other replicas, or of other models to draft from."""
        self.databases[model].apply(namespace, outputs)

    def forget(self, engine: Engine, model: str, namespace: str) -> None:
        """Drop what ``model`` has generated in ``namespace`` and what drafting learned from it, and
        all cached prompts of all namespaces, which costs those a prefill.  Call it in the engine's
        thread."""
        self.databases[model].clear(namespace)
        if model == self.config.name:
            self._ended = deque(seq for seq in self._ended if seq.namespace != namespace)
            engine.drafters.forget(namespace)
            engine.forget_prefixes()

    def find_statistics(self) -> StatisticsDatabase | None:
        """Look again for the statistics database of the configuration, which may have been added;
        does not log again that it is missing."""
        return self._open_statistics(logging.DEBUG)

    def use_statistics(self, engine: Engine, statistics: StatisticsDatabase | None) -> None:
        """Draft from another statistics database, or none, from now on; call it in the engine's
        thread."""
        self.statistics = statistics
        engine.drafters.use_statistics(statistics)

    def params(
        self, chosen: Mapping[str, Any], api_defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """The parameters a client chose, over the defaults of the configuration, and these over the
        model's own; a missing seed is drawn.  A default of ``max_tokens`` is at least the client's
        ``min_tokens``.

        Args:
            api_defaults: what holds where none of these says anything.

        Raises:
            InvalidRequest: a value is out of range, or of a wrong type.
        """
        drawn: dict[str, Any] = {"seed": secrets.randbits(63)}
        configured = {**self.model.default_sampling, **self.config.defaults.sampling}
        defaults = {**(api_defaults or {}), **configured}
        fewest = chosen.get("min_tokens")
        if "max_tokens" in defaults and isinstance(fewest, Real):
            defaults["max_tokens"] = max(defaults["max_tokens"], fewest)
        return SamplingParams(**{**drawn, **defaults, **chosen})

    def allowed_tokens(self, params: SamplingParams) -> AllowedTokens | None:
        """The tokens that a request allows; ``None`` for all.

        Raises:
            InvalidRequest: an id is not in the vocabulary.
        """
        token_ids = params.allowed_token_ids
        return AllowedTokens(token_ids, self.model.vocab_size) if len(token_ids) else None

    def seen_tokens(self, params: SamplingParams, token_ids: Iterable[int]) -> torch.Tensor:
        """What a repetition penalty needs to know of a prompt."""
        return seen_tokens(params, token_ids)

    def keyed_prompt(self, token_ids: Sequence[int], namespace: str) -> KeyedTokens | None:
        """What finds a prompt in the KV cache; ``None`` if nothing is reused."""
        is_reused = self.config.engine.prefix_caching
        return KeyedTokens.of(token_ids, namespace) if is_reused else None

    def _open_statistics(self, missing_level: int) -> StatisticsDatabase | None:
        """The statistics database of the configuration; the model is served without one too.

        Drafting fails open, so a database that cannot be used is logged, not raised.

        Args:
            missing_level: log level for a database that is missing or cannot be used.
        """
        name, statistics = self.config.name, self.config.statistics
        if statistics is None:
            return None
        fingerprint = self.tokenizer.fingerprint
        directories = _statistics_directories(statistics, fingerprint)
        directory = self._locate_statistics(directories, fingerprint)
        if directory is None:
            if statistics != BUNDLED_STATISTICS:
                logger.log(missing_level, "%s: no statistics database at %s", name, statistics)
            return None
        try:
            return StatisticsDatabase.open(directory, tokenizer=fingerprint)
        except SnapshotError as error:
            logger.log(missing_level, "%s: drafting without statistics: %s", name, error)
            return None

    def _record(self, seq: core.Sequence) -> None:
        is_shared = self.config.share_output and seq.speculation.is_output_shared
        if not is_shared or not seq.num_output_tokens:
            return
        if self._between_steps is None:
            self.own_database.record(seq)
        else:
            self._ended.append(seq)
            self._between_steps(self._add_ended)
        if self._on_output is not None:
            self._on_output(seq.namespace, seq.output_token_ids)

    def _add_ended(self, engine: Engine) -> None:
        """Add the next output to the model database, unless it was forgotten meanwhile."""
        if self._ended:
            record, seq = self.own_database.record, self._ended.popleft()
            engine.drafters.run("engine", "on_finish", record, seq)


def _check_compiler(is_compiled: bool | Literal["auto"]) -> None:
    """
    Raises:
        ConfigError: the model must be compiled but cannot be.
    """
    if is_compiled is True and not can_compile():
        raise ConfigError(
            "engine.compile: true needs a C++ compiler and the headers of Python: install what is "
            "missing, or write compile: auto"
        )


def _load_tokenizer(config: ModelConfig) -> Tokenizer:
    """
    Raises:
        ConfigError: it cannot be loaded.
        UnsupportedModel: the model could not be loaded either, and so needs no tokenizer.
    """
    try:
        return load_tokenizer(
            config.model,
            config.revision,
            trust_remote_code=config.trust_remote_code,
            chat_template=config.chat_template,
            variables=config.defaults.chat_template_kwargs,
        )
    except ConfigError:
        with suppress(ConfigError):
            read_architecture(config)
        raise


def _ending_with(model: LoadedModel, token_id: int | None) -> LoadedModel:
    """``model``, with ``token_id`` as a further end of sequences: the tokenizer's own end of text,
    which the generation configs of many fine-tuned models do not list."""
    if token_id is None or token_id >= model.vocab_size:
        return model
    return replace(model, eos_token_ids=model.eos_token_ids | {token_id})


def _statistics_directories(statistics: str, fingerprint: str) -> list[Path]:
    if statistics != BUNDLED_STATISTICS:
        return [Path(statistics)]
    return [path for path in bundled_statistics() if read_info(path).tokenizer == fingerprint]

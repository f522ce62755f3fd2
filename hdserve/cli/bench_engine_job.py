"""The work of ``hdserve bench engine``, with progress bars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hdserve.bench.contenders import EngineContender, State
from hdserve.bench.engine import Result, filling, run_rounds, summarise
from hdserve.bench.engine_setup import (
    encoded_prompts,
    make_contenders,
    prompt_tasks,
    replay_tasks,
    use_statistics,
)
from hdserve.bench.environment import commit, cpu_name
from hdserve.bench.prompts import EncodedPrompt
from hdserve.bench.random_weights import random_host
from hdserve.bench.replay_files import ReplayRow
from hdserve.bench.replay_setup import only, read_rows, source_digest
from hdserve.bench.task import Decoding, Task
from hdserve.cli.file_names import shown_name
from hdserve.cli.model_option import chosen_model, given, with_options
from hdserve.cli.progress import progress
from hdserve.config import ModelConfig
from hdserve.engine.forward.compiled import can_compile
from hdserve.engine.host import ModelHost
from hdserve.journal import Journal, file_digest
from hdserve.prompts import PromptRow, read_prompts, rows_digest

if TYPE_CHECKING:
    from hdserve.cli.bench_engine import EngineOptions


class EngineJob:
    """A loaded model, what is measured with it, and the journal.

    Args:
        result_path: see :class:`~hdserve.journal.Journal`.

    Raises:
        ConfigError: a file cannot be read, or the model cannot be loaded.
    """

    def __init__(self, options: EngineOptions, result_path: Path | None) -> None:
        self._options = options
        # What is missing or wrong is told before a model is loaded.
        rows = [] if options.prompts is None else read_prompts(options.prompts, options.limit)
        self._fill_rows = _fill_rows(options)
        model = _model(options)
        unshown = _unshown(options, rows, model)
        shape = options.random_weights
        self._host = ModelHost(model) if shape is None else random_host(model, shape)
        if options.statistics:
            use_statistics(self._host, options.statistics, is_replay=options.replay is not None)
        state = cast("State", options.state)
        # A prompt has as much room as the smallest of their caches, which memory may decide.
        self._contenders = make_contenders(options.contenders, self._host, state)
        self._tasks, num_left_out = _tasks(options, rows, self._host)
        measured = [prompt for task in self._tasks for prompt in task.prompts]
        self._shown = _shown(options, self._host) | {
            "left_out": num_left_out,
            "cut": sum(prompt.is_cut for prompt in measured),
            "in_fill": _num_in_fill(measured, self._fill_rows),
        }
        self.journal = Journal(result_path, self._shown | unshown | {"is_exact": self._is_exact})

    def run(self) -> list[Result]:
        """Run all rounds that the journal does not have, at all batch sizes."""
        options = self._options
        if self._fill_rows:
            self._fill()
        results: list[Result] = []
        num_runs = sum(
            len(filling(self._tasks, size)) * one.is_able(size)
            for size in options.sizes
            for one in self._contenders
        )
        with progress("decoding", num_runs * options.rounds) as bar:
            for size in options.sizes:
                decoding = Decoding(size, options.max_tokens, options.temperature)
                runs = run_rounds(
                    self._contenders,
                    self._tasks,
                    decoding,
                    num_rounds=options.rounds,
                    journal=self.journal,
                    progress=bar.advance,
                )
                results += summarise(runs, decoding)
        return results

    @property
    def setting(self) -> dict[str, Any]:
        """The settings shown with the results."""
        interruptions = self.journal.num_interruptions
        return self._shown | {"exact": self._is_exact, "interruptions": interruptions}

    @property
    def _is_exact(self) -> bool:
        """Whether forwards are exact; `auto` leaves it to what they take on this machine."""
        engines = [one for one in self._contenders if isinstance(one, EngineContender)]
        return any(one.is_exact for one in engines)

    def _fill(self) -> None:
        """Give each contender that drafts the answers in, or to, the rows of ``--fill``."""
        for contender in self._contenders:
            if not isinstance(contender, EngineContender) or not contender.is_drafting:
                continue
            recorded = [row.response for row in self._fill_rows if isinstance(row, ReplayRow)]
            if recorded:
                contender.fill_with(recorded)
                continue
            max_tokens = self._options.max_tokens
            asked = [row for row in self._fill_rows if isinstance(row, PromptRow)]
            prompts = list(encoded_prompts(asked, self._host, max_tokens))
            with progress("filling", len(prompts)) as bar:
                answer = partial(contender.answers, prompts, max_tokens, bar.show)
                contender.fill_with(self.journal.once(f"{contender.name}, fill", answer))


def _fill_rows(options: EngineOptions) -> Sequence[PromptRow] | Sequence[ReplayRow]:
    """Return what warms the databases before anything is measured.

    Raises:
        ConfigError, DatabaseError: the file cannot be read, or is empty.
    """
    if options.fill is None:
        return ()
    return read_prompts(options.fill) if options.replay is None else read_rows(options.fill)


def _num_in_fill(
    measured: Sequence[EncodedPrompt], fill_rows: Sequence[PromptRow] | Sequence[ReplayRow]
) -> int:
    """Return how many of the prompts that are measured the rows of ``--fill`` ask, too."""

    def asked(row: PromptRow) -> str:
        return json.dumps(row.messages, sort_keys=True)

    filled = {row.prompt if isinstance(row, ReplayRow) else asked(row) for row in fill_rows}
    return sum(not filled.isdisjoint((one.token_ids, asked(one.row))) for one in measured)


def _model(options: EngineOptions) -> ModelConfig:
    """Return the model with the settings that it is measured with.

    Raises:
        ConfigError: the configuration cannot be read, or it or an option is wrong.
    """
    model = chosen_model(options.model, options.config)
    engine = {
        **given(dtype=options.dtype, exact=options.exact),
        "compile": _compiles(options, model),
        "max_num_sequences": max(options.sizes),
        "prefix_caching": False,  # every round asks the same prompts again
        "prefill_slowdown": None,  # pacing depends on timing (docs/adr/0014)
    }
    drafting = given(max_draft_tokens=options.max_draft_tokens)
    model = with_options(model, engine=engine, drafting=drafting)
    return model.model_copy(update={"drafting": only(options.drafter, model.drafting)})


def _compiles(options: EngineOptions, model: ModelConfig) -> bool:
    """Return whether hdserve's contenders run the model compiled."""
    wanted = model.engine.compile if options.compile_ is None else options.compile_
    return can_compile() if wanted == "auto" else bool(wanted)


def _tasks(
    options: EngineOptions, rows: Sequence[PromptRow], host: ModelHost
) -> tuple[list[Task], int]:
    """Return what is decoded, and how many recorded requests of the file are left out."""
    if options.replay is not None:
        return replay_tasks(options.replay, options.limit, host, options.max_tokens)
    return prompt_tasks(rows, host, options.max_tokens), 0


def _shown(options: EngineOptions, host: ModelHost) -> dict[str, Any]:
    """Return those settings that are shown with the results."""
    is_cuda = host.model.device.type == "cuda"
    config = {} if options.config is None else {"config": shown_name(options.config)}
    return config | {
        "model": options.random_weights or host.config.name,
        "weights": "random" if options.random_weights else "real",
        "choices": "recorded" if options.replay else "the model's",
        "prompts": _file_name(options.prompts or options.replay),
        "limit": options.limit,
        "max_tokens": options.max_tokens,
        "max_draft_tokens": host.config.drafting.most_draft_tokens(host.model.device.type),
        "exact": host.config.engine.exact,
        "compiled": host.config.engine.compile,
        "state": options.state,
        "fill": _file_name(options.fill),
        "statistics": _statistics_name(options, host),
        "commit": commit(),
        "dtype": str(host.model.dtype).removeprefix("torch."),
        "num_threads": host.num_threads,
        "hardware": host.device_name if is_cuda else f"{cpu_name()}, {host.num_threads} threads",
    }


def _file_name(path: Path | None) -> str | None:
    return None if path is None else shown_name(path)


def _statistics_name(options: EngineOptions, host: ModelHost) -> str:
    if options.statistics:
        return ", ".join(map(shown_name, options.statistics))
    named, has_any = host.config.statistics, host.statistics is not None
    return ("shipped" if named == "bundled" else Path(str(named)).name) if has_any else "none"


def _unshown(
    options: EngineOptions, rows: Sequence[PromptRow], model: ModelConfig
) -> dict[str, Any]:
    """Return the other settings that the results depend on."""
    files = {"fill": options.fill, "replay": options.replay}
    return {name: file_digest(path) for name, path in files.items()} | {
        "prompts": rows_digest(rows),
        "chat_template": file_digest(model.chat_template),
        "statistics": [source_digest(path) for path in options.statistics or ()],
        "configuration": model.model_dump(mode="json"),
        "batch_sizes": options.sizes,
        "compare": options.contenders,
        "temperature": options.temperature,
    }

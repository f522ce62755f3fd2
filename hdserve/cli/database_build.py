"""``hdserve database build``: a model's answers to a file of prompts, before anybody asks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from hdserve.access import NAMESPACE, NAMESPACE_RULE
from hdserve.cli.interruption import GO_ON, interruptible
from hdserve.cli.json_option import Json, JsonOutput
from hdserve.cli.model_option import (
    Model,
    ServerConfig,
    check_served_name,
    chosen_model,
    directory_of,
    load_llm,
    model_of,
    tokenizer_of,
    with_options,
)
from hdserve.cli.options import Limit, Prompts, Temperature, takes
from hdserve.cli.progress import progress
from hdserve.cli.prompt_check import check_rows
from hdserve.config import ModelConfig, ModelDatabaseConfig
from hdserve.config.deployed import read_deployed_config
from hdserve.core import DEFAULT_NAMESPACE, FinishReason, SamplingParams
from hdserve.databases.kept import check_kept
from hdserve.databases.output_files import database_directory
from hdserve.databases.output_log import OutputLog
from hdserve.databases.output_store import OutputStore
from hdserve.databases.segment import MAX_OUTPUT_TOKENS, Segment, concatenate
from hdserve.databases.snapshot import DatabaseKey
from hdserve.databases.stored import UNBOUNDED, check_unsharded
from hdserve.errors import ConfigError, DatabaseError
from hdserve.journal import digest_of_list, file_digest
from hdserve.prompts import PromptRow, read_prompts, rows_digest

if TYPE_CHECKING:
    from hdserve.completion import Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions:
    """What is answered, how, and which database the answers are added to.

    Raises:
        ConfigError: no key could have this namespace, or no model this name.
        InvalidRequest: a value is out of range.
    """

    root: Annotated[Path, typer.Argument(help="The `snapshot_dir` of the configuration.")]
    prompts: Prompts
    model: Model = None
    config: ServerConfig = None
    name: Annotated[
        str | None,
        typer.Option(
            help="The `name` it is served under; default: that of --config, or --model, of a "
            "directory the last part."
        ),
    ] = None
    namespace: Annotated[str, typer.Option(help="Whose requests draft from it.")] = (
        DEFAULT_NAMESPACE
    )
    max_tokens: Annotated[
        int, typer.Option(help="Tokens per answer.", min=1, max=MAX_OUTPUT_TOKENS)
    ] = 256
    batch_size: Annotated[int, typer.Option(help="Prompts answered together.", min=1)] = 8
    temperature: Temperature = 0.0
    limit: Limit = None
    json_path: Json = None

    def __post_init__(self) -> None:
        if not NAMESPACE.fullmatch(self.namespace):
            raise ConfigError(f"--namespace {self.namespace[:64]!r}: {NAMESPACE_RULE}")
        check_served_name("--name", self.name)
        SamplingParams(**self.sampling)  # checked before a model is loaded

    @property
    def sampling(self) -> dict[str, Any]:
        """The chosen options, as fields of :class:`~hdserve.core.SamplingParams`."""
        return {"max_tokens": self.max_tokens, "temperature": self.temperature}


@dataclass(slots=True)
class _Answered:
    """What came of the prompts that had no answer yet.

    Attributes:
        failure: why the first of those that failed did.
    """

    num_kept: int = 0
    num_failed: int = 0
    failure: str = ""

    def count(self, num_kept: int, answers: Sequence[Completion]) -> None:
        """Add the answers to a batch, of which ``num_kept`` are kept."""
        self.num_kept += num_kept
        failures = [str(answer.error) for answer in answers if _has_failed(answer)]
        self.num_failed += len(failures)
        self.failure = self.failure or next(iter(failures), "")


@takes(BuildOptions)
@interruptible()
def build(options: BuildOptions) -> None:
    """Answer prompts and keep the answers in a model database that is not in use.

    A new model then drafts from its first request on as one that has served such requests does.
    An interrupted build goes on where it was when the same command is run again.  Where an answer
    failed it exits with 1, after all others, and keeps none: the same command answers that prompt
    again.  It ends with an error when a server would forget the oldest answers for the next ones.
    """
    output = JsonOutput(options.json_path)
    model, limits = _served(options)
    check_unsharded(options.root, limits.num_shards)
    all_rows = read_prompts(options.prompts)
    rows = all_rows[: options.limit]
    key = DatabaseKey(model.name, tokenizer_of(model).fingerprint)
    store = OutputStore(database_directory(options.root, key), key, lock_timeout_s=1.0)
    store.check_writable()
    try:
        origin = _origin(options, model, all_rows)
        answered = _add_answers(options, model, limits, origin, rows, store)
    finally:
        store.close()
    if output.has_text:
        typer.echo(
            f"{key.model}: {len(rows):,} prompts, {answered.num_kept:,} of them answered now"
        )
    output.write(
        {
            "model": key.model,
            "num_prompts": len(rows),
            "num_answered_now": answered.num_kept,
            "num_failed": answered.num_failed,
        }
    )
    if answered.num_failed:
        told = f"{answered.num_failed:,} answers failed and were not kept: {answered.failure}"
        typer.echo(f"hdserve: {told}; {GO_ON}", err=True)
        raise typer.Exit(1)


def _served(options: BuildOptions) -> tuple[ModelConfig, ModelDatabaseConfig]:
    """Return the model, under the name that the database is for, and what a server keeps of it.

    Raises:
        ConfigError: the configuration cannot be read or is wrong, or has no such model; or no model
            can be served under the name.
    """
    if options.config is not None:
        server = read_deployed_config(options.config).config
        model, limits = model_of(server, options.config, options.model), server.model_database
        name = model.name
    else:
        model, limits = chosen_model(options.model, None), ModelDatabaseConfig()
        name = os.path.basename(directory_of(model.model) or "") or model.name
        check_served_name("--model", None if options.name else name)
    place = directory_of(model.model) or model.model  # the same build, however it is written
    return model.model_copy(update={"name": options.name or name, "model": place}), limits


def _add_answers(
    options: BuildOptions,
    model: ModelConfig,
    limits: ModelDatabaseConfig,
    origin: str,
    rows: Sequence[PromptRow],
    store: OutputStore,
) -> _Answered:
    """Answer the rows that ``store`` has no answer for yet.

    Args:
        origin: the name of the build in ``store``.

    Raises:
        DatabaseError: an answer cannot be written, or a server would forget the oldest for it;
            those before it are kept.
        InvalidRequest: a row cannot be answered; names it, before any is answered.
    """
    log = OutputLog(UNBOUNDED, UNBOUNDED, first_version=store.first_version)
    store.restore(log)
    missing = _missing(log, options.namespace, origin, len(rows))
    if not missing:
        return _Answered()
    check_kept(log, {options.namespace: 1}, limits.max_bytes, limits.max_total_bytes)
    llm = load_llm(with_options(model, engine={"max_num_sequences": options.batch_size}))
    check_rows(llm, (row.messages for row in rows), llm.sampling(**options.sampling))
    answered = _Answered()
    with progress("answering", len(rows), len(rows) - len(missing)) as bar:
        for begin in range(0, len(missing), options.batch_size):
            batch = missing[begin : begin + options.batch_size]
            params = llm.sampling(**options.sampling)
            answers = llm.generate([rows[index].messages for index in batch], params)
            segment = _segment(origin, zip(batch, answers, strict=True))
            new_bytes = {options.namespace: segment.num_bytes}
            check_kept(log, new_bytes, limits.max_bytes, limits.max_total_bytes)
            answered.count(len(segment), answers)
            for appended in log.append(options.namespace, segment):
                store.append(options.namespace, appended)
            if store.num_failures:
                break  # further answers could not be kept either
            bar.advance(len(batch))
    if not store.sync(log) or store.num_failures:
        raise DatabaseError(f"{store.directory} cannot be written; the log says why")
    return answered


def _origin(options: BuildOptions, model: ModelConfig, all_rows: Sequence[PromptRow]) -> str:
    """Return a name for a build, so that repeating it counts each of its answers once, with another
    limit, too; not with another chat template or other defaults, whose answers are others.

    Raises:
        ConfigError: the chat template cannot be read.
    """
    settings = [model.model, model.revision, options.max_tokens, options.temperature]
    template, overridden = file_digest(model.chat_template), set(options.sampling)
    defaults = model.defaults.model_dump(mode="json", exclude_unset=True, exclude=overridden)
    further = {"chat_template": template, **defaults}
    told = {name: value for name, value in further.items() if value is not None}
    return f"build-{digest_of_list([*settings, rows_digest(all_rows), *([told] if told else ())])}"


def _missing(log: OutputLog, namespace: str, origin: str, num_rows: int) -> list[int]:
    intervals = log.partition(namespace).seen().get(origin, [])
    done = {index for start, stop in intervals for index in range(start, stop)}
    return [index for index in range(num_rows) if index not in done]


def _segment(origin: str, answers: Iterable[tuple[int, Completion]]) -> Segment:
    return concatenate(
        [
            Segment.from_outputs(origin, index, [np.array(answer.token_ids, np.uint32)])
            for index, answer in answers
            if answer.token_ids and not _has_failed(answer)
        ]
    )


def _has_failed(answer: Completion) -> bool:
    return answer.finish_reason == FinishReason.ERROR

"""``hdserve generate``: answers on the terminal, without Ray and without a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hdserve.cli.answers import TextPrinter, has_failed, line, with_answer
from hdserve.cli.file_names import shown
from hdserve.cli.interruption import how_to_go_on, interruptible
from hdserve.cli.json_option import OPTION, JsonOutput
from hdserve.cli.model_option import (
    Model,
    ServerConfig,
    chosen_model,
    given,
    load_llm,
    with_options,
)
from hdserve.cli.options import PROMPTS_HELP, takes
from hdserve.cli.progress import progress
from hdserve.cli.prompt_check import check_rows
from hdserve.cli.whole_file import write_whole
from hdserve.config import ModelConfig
from hdserve.core import SamplingParams, SpeculationParams, StepOutput
from hdserve.errors import InvalidRequest
from hdserve.journal import Journal, digest_of_list, file_digest
from hdserve.prompts import PromptRow, read_prompts

if TYPE_CHECKING:
    from hdserve.completion import Completion
    from hdserve.llm import Prompt

_MAX_TOKENS: Final = 256

_SIZES: Mapping[str, set[str] | bool] = {
    "engine": {
        "kv_cache_tokens",
        "max_num_queued",
        "max_num_sequences",
        "num_threads",
        "prefill_chunk_tokens",
        "prefill_slowdown",
    },
    "autoscaling": True,
    "num_cpus": True,
    "num_gpus": True,
    "num_replicas": True,
    "resources": True,
    "session_affinity": True,
}
"""Settings of a model that say how much is done at a time, and where: a job may go on with others,
for example after it ran out of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """What is answered, how, and how it is shown.

    Raises:
        InvalidRequest: options contradict each other, or a value is out of range.
    """

    prompt: Annotated[str | None, typer.Argument(help="What to ask; `-` reads standard input.")] = (
        None
    )
    prompts_path: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help=PROMPTS_HELP),
    ] = None
    model: Model = None
    config: ServerConfig = None
    completes: Annotated[
        bool, typer.Option("--complete", help="Continue the text instead of answering it.")
    ] = False
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens per answer.", min=1, show_default=f"that of --config, else {_MAX_TOKENS}"
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 is greedy.", min=0.0, show_default="that of --config, else the model's own"
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Default: a random one.")] = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Rows of --prompts answered together with --json.",
            show_default="the model's `engine.max_num_sequences`",
            min=1,
        ),
    ] = None
    drafts: Annotated[bool, typer.Option(help="Decode with drafts, or plainly.")] = True
    shows_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour tokens by where they came from.")
    ] = False
    json_path: Annotated[
        Path | None,
        typer.Option(
            OPTION,
            metavar="[PATH]",
            help="Print a JSON object a row; with PATH, write them there, and the job can be "
            "resumed.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.json_path is not None and self.shows_drafts:
            raise InvalidRequest("--show-drafts colours text; it cannot go with --json")
        if self.prompt is None and self.prompts_path is None:
            raise InvalidRequest("give a prompt, or a file of them with --prompts")
        if self.prompt is not None and self.prompts_path is not None:
            raise InvalidRequest("give a prompt or --prompts, not both")
        SamplingParams(**self.sampling)  # checked before a model is loaded

    @property
    def sampling(self) -> dict[str, Any]:
        """The chosen options, as fields of :class:`~hdserve.core.SamplingParams`."""
        chosen = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        return {name: value for name, value in chosen.items() if value is not None}


@takes(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Answer a prompt, or each row of a file, as it is generated.

    Rows of a file are answered with the same model, so later answers are drafted from earlier ones:
    as text one after the other, with --json --batch-size at a time, the next row as soon as one is
    answered.  With --json each row has its `text`, `finish_reason`, `stop_reason` and what drafting
    did.  An interrupted job with --json PATH goes on with the rows it has not answered when the
    same command is run again, or the same with another --batch-size.  Where an answer failed it
    exits with 1, after all others; the same command tries those rows again.
    """
    output = JsonOutput(options.json_path)
    rows = list(_rows(options))
    model = chosen_model(options.model, options.config)
    if output.file is not None:
        with interruptible(how_to_go_on(output.lasting_file)):
            journal = Journal(output.lasting_file, _settings(rows, options, model))
            _write_answers(rows, _Answers(options, model, rows), output.file, journal)
        return
    with interruptible("" if options.prompts_path is None else how_to_go_on(None)):
        answers = _Answers(options, model, rows)
        if output.has_text:
            printer = TextPrinter(options.shows_drafts)
            are_answered = [printer.print(answers.stream(row)) for row in rows]
        else:
            are_answered = list(_print_answers(rows, answers))
    if not all(are_answered):
        raise typer.Exit(1)


class _Answers:
    """A model that answers with the options of the command.

    Raises:
        InvalidRequest: one of ``rows`` cannot be answered; if they are of a file, it is named.
    """

    def __init__(
        self, options: GenerateOptions, model: ModelConfig, rows: Sequence[dict[str, Any]]
    ) -> None:
        is_file = options.prompts_path is not None
        if is_file:
            model = with_options(model, engine=given(max_num_sequences=options.batch_size))
        self._llm = load_llm(model)
        self._sampling = _sampling(options, model)
        self._speculation = SpeculationParams(is_enabled=options.drafts)
        if is_file:
            check_rows(self._llm, map(_prompt, rows), self._llm.sampling(**self._sampling))
        else:
            self.stream(rows[0])  # only checks it

    def stream(self, row: dict[str, Any]) -> Iterator[StepOutput]:
        """The answer to a row, step by step."""
        params = self._llm.sampling(**self._sampling)
        return self._llm.stream(_prompt(row), params, self._speculation)

    def as_completed(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Completion]]:
        """The answers to rows, decoded together, as they end, each with the index of its row."""
        params = [self._llm.sampling(**self._sampling) for _ in rows]
        return self._llm.as_completed(map(_prompt, rows), params, self._speculation)

    def remember(self, outputs: Sequence[list[int]]) -> None:
        """Draft from the answers that were given in earlier runs."""
        self._llm.remember(outputs)


def _sampling(options: GenerateOptions, model: ModelConfig) -> dict[str, Any]:
    """The chosen options, and how long an answer may be if neither they nor the model's
    configuration say."""
    length = {"max_tokens": _MAX_TOKENS} if model.defaults.max_tokens is None else {}
    return {**length, **options.sampling}


def _settings(
    rows: Sequence[dict[str, Any]], options: GenerateOptions, model: ModelConfig
) -> dict[str, Any]:
    """The settings that the answers depend on."""
    chosen = model.model_dump(mode="json", exclude_unset=True, exclude=_SIZES)
    return {
        "model": {"engine": {}} | chosen,
        "chat_template": file_digest(model.chat_template),
        "input": digest_of_list(rows),
        "complete": options.completes,
        "drafts": options.drafts,
        **_sampling(options, model),
    }


def _print_answers(rows: Sequence[dict[str, Any]], model: _Answers) -> Iterator[bool]:
    """Print each row with its answer as a line of JSON, in their order; yield whether it
    succeeded."""
    ended: dict[int, dict[str, Any]] = {}
    num_printed = 0
    for number, answer in model.as_completed(rows):
        ended[number] = with_answer(rows[number], answer)
        while num_printed in ended:
            found = ended.pop(num_printed)
            typer.echo(line(found))
            yield not has_failed(found)
            num_printed += 1


def _write_answers(
    rows: Sequence[dict[str, Any]], model: _Answers, path: Path, journal: Journal
) -> None:
    """Answer what ``journal`` does not have yet, then write all answers to ``path``."""
    failed = _answer_missing(rows, model, journal)
    answers = (
        failed[number] if number in failed else journal[_unit(number)]["answer"]
        for number in range(len(rows))
    )
    write_whole(path, "".join(line(one) + "\n" for one in answers))
    num_now = len(rows) - journal.num_restored - len(failed)
    typer.echo(f"{shown(path)}: {len(rows):,} rows, {num_now:,} of them answered now")
    if not failed:
        journal.finish()
        return
    reason = next(iter(failed.values()))["error"]
    advice = "" if journal.path is None else "; the same command tries them again"
    typer.echo(f"hdserve: {len(failed):,} answers failed: {reason}{advice}", err=True)
    raise typer.Exit(1)


def _answer_missing(
    rows: Sequence[dict[str, Any]], model: _Answers, journal: Journal
) -> dict[int, dict[str, Any]]:
    """Answer the rows that ``journal`` does not have, each a unit of it that is kept when it ends.
    They are drafted from those that it has, too.

    Returns:
        What there is of the answers that failed, by the numbers of their rows; ``journal`` does not
        get them.
    """
    missing = [number for number in range(len(rows)) if _unit(number) not in journal]
    kept = [_unit(number) for number in range(len(rows)) if _unit(number) in journal]
    model.remember([journal[unit]["token_ids"] for unit in kept])
    failed = {}
    with progress("answering", len(rows), len(kept)) as bar:
        for index, answer in model.as_completed([rows[number] for number in missing]):
            number = missing[index]
            found = with_answer(rows[number], answer)
            if has_failed(found):
                failed[number] = found
            else:
                result = {"answer": found, "token_ids": answer.token_ids}
                journal.once(_unit(number), partial(dict, result))
            bar.advance()
    return failed


def _unit(number: int) -> str:
    return f"row {number}"


def _rows(options: GenerateOptions) -> Iterator[dict[str, Any]]:
    """The rows to answer, each with ``prompt`` or ``messages``.

    Raises:
        InvalidRequest: a text is empty, or standard input is.
    """
    if options.prompts_path is not None:
        rows = read_prompts(options.prompts_path)
    else:
        text = _standard_input() if options.prompt == "-" else options.prompt
        assert text is not None
        rows = [PromptRow("", "", text)]
    for row in rows:
        if not (row.text or row.conversation):
            reason = "the prompt is empty"
            raise InvalidRequest(f"{row.place}: {reason}" if row.place else reason, "prompt")
    return (_answerable(row, completes=options.completes) for row in rows)


def _standard_input() -> str:
    """
    Raises:
        InvalidRequest: it is closed, or not text.
    """
    if sys.stdin is None:
        raise InvalidRequest("standard input is closed", "prompt")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest("standard input is not UTF-8 text", "prompt") from error


def _answerable(row: PromptRow, *, completes: bool) -> dict[str, Any]:
    if completes and not row.conversation:
        return {**row.fields, "prompt": row.text}
    return {**row.fields, "messages": list(row.messages)}


def _prompt(row: dict[str, Any]) -> Prompt:
    found: Prompt = row.get("messages") or row["prompt"]
    return found

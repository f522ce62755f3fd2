"""``hdserve generate``: answers on the terminal, without Ray and without a server."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hdserve.cli.answers import JsonPrinter, TextPrinter, collected, has_failed, line
from hdserve.cli.interruption import how_to_go_on, interruptible
from hdserve.cli.json_option import OPTION, JsonOutput
from hdserve.cli.options import PROMPTS_HELP, AnswerTokens, Model, takes
from hdserve.cli.progress import progress
from hdserve.cli.prompt_check import check_rows
from hdserve.cli.whole_file import write_whole
from hdserve.core import SamplingParams, SpeculationParams, StepOutput
from hdserve.errors import InvalidRequest
from hdserve.journal import Journal
from hdserve.prompts import PromptRow, read_prompts

if TYPE_CHECKING:
    from hdserve.llm import Prompt


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
        typer.Option(
            "--prompts", "--input", metavar="FILE", help=f"{PROMPTS_HELP} --input is the same."
        ),
    ] = None
    model: Model = "hdserve-tiny"
    completes: Annotated[
        bool, typer.Option("--complete", help="Continue the text instead of answering it.")
    ] = False
    max_tokens: AnswerTokens = 256
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default: the model's own.", min=0.0)
    ] = None
    seed: Annotated[int | None, typer.Option(help="Default: a random one.")] = None
    drafts: Annotated[bool, typer.Option(help="Decode with drafts, or plainly.")] = True
    shows_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour tokens by where they came from.")
    ] = False
    json_path: Annotated[
        Path | None,
        typer.Option(
            OPTION,
            "--output",
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

    Rows of a file are answered one after the other with the same model, so later answers are
    drafted from earlier ones.  With --json each row has its `text`, `finish_reason`, `stop_reason`
    and what drafting did.  An interrupted job with --json PATH goes on with the first row it has
    not answered when the same command is run again.  --output is another name of --json.  It exits
    with 1 where an answer failed, after all others.
    """
    output = JsonOutput(options.json_path)
    rows = list(_rows(options))
    if output.file is not None:
        with interruptible(how_to_go_on(output.lasting_file)):
            journal = Journal(output.lasting_file, _settings(rows, options))
            _write_answers(rows, options, output.file, journal)
        return
    printer = TextPrinter(options.shows_drafts) if output.has_text else JsonPrinter()
    with interruptible("" if options.prompts_path is None else how_to_go_on(None)):
        answers = _Answers(options)
        if options.prompts_path is not None:
            answers.check(rows)
        are_answered = [printer.print(row, answers.stream(row)) for row in rows]
    if not all(are_answered):
        raise typer.Exit(1)


class _Answers:
    """A model that answers with the options of the command."""

    def __init__(self, options: GenerateOptions) -> None:
        from hdserve.llm import LLM

        self._llm = LLM(options.model)
        self._sampling = options.sampling
        self._speculation = SpeculationParams(is_enabled=options.drafts)

    def check(self, rows: Sequence[dict[str, Any]]) -> None:
        """
        Raises:
            InvalidRequest: a row of the file cannot be answered; names it.
        """
        check_rows(self._llm, map(_prompt, rows), self._llm.sampling(**self._sampling))

    def stream(self, row: dict[str, Any]) -> Iterator[StepOutput]:
        """The answer to a row, step by step."""
        params = self._llm.sampling(**self._sampling)
        return self._llm.stream(_prompt(row), params, self._speculation)

    def remember(self, token_ids: list[int]) -> None:
        """Draft from an answer that was given in an earlier run."""
        self._llm.remember([token_ids])


def _settings(rows: Sequence[dict[str, Any]], options: GenerateOptions) -> dict[str, Any]:
    """The settings that the answers depend on."""
    return {
        "model": options.model,
        "input": _digest(rows),
        "complete": options.completes,
        "drafts": options.drafts,
        **options.sampling,
    }


def _write_answers(
    rows: Sequence[dict[str, Any]], options: GenerateOptions, path: Path, journal: Journal
) -> None:
    """Answer what ``journal`` does not have yet, then write all answers to ``path``."""
    model = _Answers(options)
    if options.prompts_path is not None:
        model.check(rows)

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        found, seq = collected(row, model.stream(row))
        return {"answer": found, "token_ids": seq.output_token_ids}

    answers = []
    with progress("answering", len(rows)) as bar:
        for number, row in enumerate(rows):
            unit = f"row {number}"
            is_restored = unit in journal
            result = journal.once(unit, partial(answer, row))
            if is_restored:
                model.remember(result["token_ids"])
            answers.append(result["answer"])
            bar.advance()
    write_whole(path, "".join(line(one) + "\n" for one in answers))
    journal.finish()
    num_now = len(rows) - journal.num_restored
    typer.echo(f"{path}: {len(rows):,} rows, {num_now:,} of them answered now")
    if any(map(has_failed, answers)):
        raise typer.Exit(1)


def _digest(rows: Sequence[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


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
        return sys.stdin.buffer.read().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest("standard input is not UTF-8 text", "prompt") from error


def _answerable(row: PromptRow, *, completes: bool) -> dict[str, Any]:
    if completes and not row.conversation:
        return {**row.fields, "prompt": row.text}
    return {**row.fields, "messages": list(row.messages)}


def _prompt(row: dict[str, Any]) -> Prompt:
    found: Prompt = row.get("messages") or row["prompt"]
    return found

"""``hdserve generate``: answers on the terminal, without Ray and without a server."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hdserve import core
from hdserve.cli.interruption import how_to_go_on, interruptible
from hdserve.cli.json_option import OPTION, JsonOutput
from hdserve.cli.progress import progress
from hdserve.cli.prompts_option import HELP as PROMPTS_HELP
from hdserve.cli.whole_file import write_whole
from hdserve.core import SpeculationParams, StepOutput
from hdserve.errors import InvalidRequest
from hdserve.journal import Journal
from hdserve.prompts import PromptRow, read_prompts

if TYPE_CHECKING:
    from hdserve.llm import Prompt

_STYLES = {
    "plain": "",
    "context": "black on yellow",
    "model": "black on cyan",
    "statistics": "black on magenta",
    "recycled": "black on green",
    "other": "black on blue",
}


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; `-` reads standard input.")
    ] = None,
    prompts_path: Annotated[
        Path | None,
        typer.Option(
            "--prompts", "--input", metavar="FILE", help=f"{PROMPTS_HELP} --input is the same."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="A bundled model, a directory or a Hugging Face id.")
    ] = "hdserve-tiny",
    completes: Annotated[
        bool, typer.Option("--complete", help="Continue the text instead of answering it.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=1)] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default: the model's own.", min=0.0)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default: a random one.")] = None,
    drafts: Annotated[bool, typer.Option(help="Decode with drafts, or plainly.")] = True,
    shows_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour tokens by where they came from.")
    ] = False,
    json_path: Annotated[
        Path | None,
        typer.Option(
            OPTION,
            "--output",
            metavar="[PATH]",
            help="Print a JSON object a row; with PATH, write them there, and the job can be "
            "resumed.",
        ),
    ] = None,
) -> None:
    """Answer a prompt, or each row of a file, as it is generated.

    Rows of a file are answered one after the other with the same model, so later answers are
    drafted from earlier ones.  With --json each row has its `text`, `finish_reason` and what
    drafting did.  An interrupted job with --json PATH goes on with the first row it has not
    answered when the same command is run again.  --output is another name of --json.
    """
    output = JsonOutput(json_path)
    if json_path is not None and shows_drafts:
        raise InvalidRequest("--show-drafts colours text; it cannot go with --json")
    rows = list(_rows(prompt, prompts_path, completes=completes))
    chosen = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    sampling = {name: value for name, value in chosen.items() if value is not None}
    speculation = SpeculationParams(is_enabled=drafts)
    if output.file is not None:
        settings = {
            "model": model,
            "input": _digest(rows),
            "complete": completes,
            "drafts": drafts,
            **chosen,
        }
        with interruptible():
            _write_answers(rows, model, sampling, speculation, output.file, settings)
        return
    printer = _TextPrinter(shows_drafts) if output.has_text else _JsonPrinter()
    with interruptible("" if prompts_path is None else how_to_go_on(None)):
        _print_answers(rows, model, sampling, speculation, printer)


def _print_answers(
    rows: Sequence[dict[str, Any]],
    model: str,
    sampling: dict[str, Any],
    speculation: SpeculationParams,
    printer: _TextPrinter | _JsonPrinter,
) -> None:
    from hdserve.llm import LLM

    llm = LLM(model)
    for row in rows:
        printer.print(row, llm.stream(_prompt(row), llm.sampling(**sampling), speculation))


def _write_answers(
    rows: Sequence[dict[str, Any]],
    model: str,
    sampling: dict[str, Any],
    speculation: SpeculationParams,
    path: Path,
    settings: dict[str, Any],
) -> None:
    """Answer what a journal beside ``path`` does not hold yet, then write all answers there."""
    from hdserve.llm import LLM

    journal = Journal(path, settings)
    llm = LLM(model)

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        outputs = llm.stream(_prompt(row), llm.sampling(**sampling), speculation)
        found, seq = _answer(row, outputs)
        return {"answer": found, "token_ids": seq.output_token_ids}

    answers = []
    with progress("answering", len(rows)) as bar:
        for number, row in enumerate(rows):
            unit = f"row {number}"
            is_restored = unit in journal
            result = journal.once(unit, partial(answer, row))
            if is_restored:
                llm.remember([result["token_ids"]])
            answers.append(result["answer"])
            bar.advance()
    write_whole(path, "".join(_line(one) + "\n" for one in answers))
    journal.finish()
    num_now = len(rows) - journal.num_restored
    typer.echo(f"{path}: {len(rows):,} rows, {num_now:,} of them answered now")


class _TextPrinter:
    """Writes the text as it comes; with ``shows_drafts`` in colours, and with the figures."""

    def __init__(self, shows_drafts: bool) -> None:
        self._shows_drafts = shows_drafts
        self._console = Console(highlight=False, soft_wrap=True)
        if shows_drafts:
            names = [name for name in _STYLES if name != "other"]
            legend = Text(" ").join(Text(f" {name} ", _STYLES[name]) for name in names)
            self._console.print(legend)

    def print(self, _row: dict[str, Any], outputs: Iterable[StepOutput]) -> None:
        last = None
        for last in outputs:
            if not self._shows_drafts:
                typer.echo(last.text, nl=False)
                sys.stdout.flush()
                continue
            for text, source in zip(last.texts, last.sources, strict=True):
                self._console.print(Text(text, _STYLES[source.label]), end="")
        typer.echo()
        if last is not None and self._shows_drafts:
            self._console.print(_summary(last), style="dim")


class _JsonPrinter:
    """One object a row, when its answer is complete."""

    def print(self, row: dict[str, Any], outputs: Iterable[StepOutput]) -> None:
        typer.echo(_line(_answer(row, outputs)[0]))


def _answer(
    row: dict[str, Any], outputs: Iterable[StepOutput]
) -> tuple[dict[str, Any], core.Sequence]:
    """The row with its answer and what drafting did, and the sequence."""
    collected = list(outputs)
    seq = collected[-1].sequence
    counts = seq.counts
    found = {
        **row,
        "text": "".join(output.text for output in collected),
        "finish_reason": seq.finish_reason,
        "num_tokens": seq.num_output_tokens,
        "num_steps": counts.num_steps,
        "num_drafts": counts.num_drafts,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "accepted_by_source": {
            source.label: count for source, count in sorted(counts.accepted_by_source.items())
        },
    }
    return found, seq


def _digest(rows: Sequence[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _line(answer: dict[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False)


def _summary(last: StepOutput) -> str:
    seq = last.sequence
    counts = seq.counts
    told = f"{seq.num_output_tokens} tokens in {counts.num_steps} steps"
    if counts.num_drafts:
        length = 1 + counts.num_accepted_tokens / counts.num_drafts
        told += f", mean acceptance length {length:.2f}"
    return told


def _rows(
    prompt: str | None, prompts_path: Path | None, *, completes: bool
) -> Iterator[dict[str, Any]]:
    """What to answer, each with ``prompt`` or ``messages``."""
    if prompt is not None and prompts_path is None:
        text = sys.stdin.read() if prompt == "-" else prompt
        yield _answerable(PromptRow("", "", text), completes=completes)
    elif prompts_path is not None and prompt is None:
        for row in read_prompts(prompts_path):
            yield _answerable(row, completes=completes)
    else:
        raise InvalidRequest("give a prompt or --prompts, and not both")


def _answerable(row: PromptRow, *, completes: bool) -> dict[str, Any]:
    if completes and not row.conversation:
        return {**row.fields, "prompt": row.text}
    return {**row.fields, "messages": list(row.messages)}


def _prompt(row: dict[str, Any]) -> Prompt:
    found: Prompt = row.get("messages") or row["prompt"]
    return found

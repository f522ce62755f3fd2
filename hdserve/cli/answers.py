"""Answers of ``hdserve generate`` as text, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from hdserve.completion import Completion
from hdserve.core import FinishReason, StepOutput

_STYLES = {
    "plain": "",
    "context": "black on yellow",
    "model": "black on cyan",
    "statistics": "black on magenta",
    "recycled": "black on green",
    "other": "black on blue",
    "grammar": "black on white",
}


class TextPrinter:
    """Writes the text as it comes; with ``shows_drafts`` in colours, and with figures."""

    def __init__(self, shows_drafts: bool) -> None:
        self._shows_drafts = shows_drafts
        self._console = Console(highlight=False, soft_wrap=True)
        if shows_drafts and self._console.color_system is not None:
            names = [name for name in _STYLES if name not in ("other", "grammar")]
            legend = Text(" ").join(Text(f" {name} ", _STYLES[name]) for name in names)
            self._console.print(legend)

    def print(self, outputs: Iterable[StepOutput]) -> bool:
        """Print one answer, and a newline; if it failed, the reason on standard error.
        Returns whether it succeeded."""
        last = None
        try:
            for last in outputs:
                self._show(last)
        finally:  # also of an answer that is interrupted
            typer.echo()
        if last is not None and last.error is not None:
            typer.echo(f"hdserve: {last.error}", err=True)
        if last is not None and self._shows_drafts:
            self._console.print(_summary(last), style="dim")
        return last is None or last.error is None

    def _show(self, output: StepOutput) -> None:
        if not self._shows_drafts:
            typer.echo(output.text, nl=False)  # at once
            return
        for text, source in zip(output.texts, output.sources, strict=True):
            self._console.print(Text(text, _STYLES[source.label]), end="")


def with_answer(row: dict[str, Any], answer: Completion) -> dict[str, Any]:
    """Return the row with its answer, the reason if it failed, and what drafting did."""
    counts = answer.counts
    return {
        **row,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        **({} if answer.error is None else {"error": str(answer.error)}),
        "num_tokens": len(answer.token_ids),
        "num_steps": counts.num_steps,
        "num_drafts": counts.num_drafts,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "accepted_by_source": {
            source.label: count for source, count in sorted(counts.accepted_by_source.items())
        },
    }


def has_failed(answer: dict[str, Any]) -> bool:
    """Whether there is no answer; a row's own fields may have any names."""
    return bool(answer["finish_reason"] == FinishReason.ERROR)


def line(answer: dict[str, Any]) -> str:
    """Return an answer as a line of a file of answers."""
    return json.dumps(answer, ensure_ascii=False)


def _summary(last: StepOutput) -> str:
    seq = last.sequence
    counts = seq.counts
    told = f"{seq.num_output_tokens} tokens in {counts.num_steps} steps"
    if counts.mean_acceptance_length is not None:
        told += f", mean acceptance length {counts.mean_acceptance_length:.2f}"
    return told

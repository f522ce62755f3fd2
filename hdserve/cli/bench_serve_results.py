"""The results of ``hdserve bench serve``: kept, written and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from hdserve.bench.load import Load
from hdserve.bench.spec_decode import DraftTotals
from hdserve.cli.json_option import JsonOutput
from hdserve.journal import Journal


class LoadResults:
    """Keeps the rows so far, those of an interrupted job first.

    Args:
        output: where all rows are written in the end.
        make_row: makes a row from a load, the model's name and what the server drafted meanwhile.
    """

    def __init__(
        self,
        journal: Journal,
        output: JsonOutput,
        make_row: Callable[[Load, str, DraftTotals | None], dict[str, Any]],
    ) -> None:
        self._journal = journal
        self._output = output
        self._make_row = make_row
        self.num_restored = journal.num_restored
        self.rows = [journal.once(_unit(number), dict) for number in range(self.num_restored)]
        self.is_interrupted = False

    def keep(self, load: Load, model_name: str, drafts: DraftTotals | None) -> None:
        """Keep the row of a load; one that was interrupted is written, and measured again when the
        job is resumed."""
        row = self._make_row(load, model_name, drafts)
        self.is_interrupted = load.is_interrupted
        if load.is_interrupted:
            num_asked = max(load.num_asked, load.plan.num_asked)
            self._journal.note(_unit(len(self.rows)), num_asked)
        else:
            row = self._journal.once(_unit(len(self.rows)), lambda: row)
        self.rows.append(row)

    @property
    def num_asked(self) -> int:
        """How many requests of the next load were sent before it was interrupted."""
        return int(self._journal.notes.get(_unit(self.num_restored), 0))

    def write(self) -> None:
        """Write all rows to the output; without any, a file with earlier results stays."""
        file = self._output.lasting_file
        if not self.rows and file is not None and file.exists():
            return
        interruptions = self._journal.num_interruptions
        self._output.write({"results": self.rows, "interruptions": interruptions})


def _unit(number: int) -> str:
    return f"load {number}"


WIDTH = 190
"""The table's width in terminal columns; a narrower terminal wraps its lines."""


def load_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a line per load; figures that a row lacks are shown as ``-``."""
    columns = {
        "concurrency": "max_concurrency",
        "prompts again": "num_repeated_prompts",
        "completed": "completed",
        "rejected": "rejected",
        "failed": "failed",
        "requests/s": "request_throughput",
        "output tokens/s": "output_throughput",
        "TTFT p50": "median_ttft_ms",
        "p99 ms": "p99_ttft_ms",
        "TPOT p50": "median_tpot_ms",
        "p99 ms ": "p99_tpot_ms",
        "ITL p50": "median_itl_ms",
        "p99 ms  ": "p99_itl_ms",
        "E2EL p50": "median_e2el_ms",
        "p99 ms   ": "p99_e2el_ms",
        "acceptance length": "spec_decode_acceptance_length",
    }
    title = f"{results[0]['model_id']} at {results[0]['base_url']}" if results else ""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(*(_shown(row.get(key)) for key in columns.values()))
    return table


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"

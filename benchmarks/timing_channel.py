"""What shared drafts tell: can one client find out what another asked, from speed alone?

    python -m benchmarks.timing_channel --model hdserve-tiny --json build/timing.json

A victim asks half of a list of questions; then an attacker asks all of them and guesses, from what
a client can see, which half it was.  Reported is the probability that the attacker ranks a question
that was asked above one that was not (the area under the ROC curve): 1.0 is certainty, 0.5 a coin.
The attacker sees the number of verification steps, which is the number of events of a stream, or
the time of the whole answer.  The questions differ by themselves, so both figures are also given
for a victim that asked nothing; and it is counted how many answers took another number of steps.
"""

from __future__ import annotations

import itertools
import json
import operator
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hdserve import core
from hdserve.config import ModelConfig
from hdserve.core import SamplingParams, SpeculationParams
from hdserve.engine.engine import Engine
from hdserve.engine.host import ModelHost

PLACES = ("San Jose", "Cambridge", "Oakland", "Milpitas", "Fremont")
TIMES = ("at noon", "at seven", "on Monday", "tonight")
THINGS = ("a table", "a train", "a taxi", "a room", "a film")


CONTROL = "nobody asked"
SETTINGS = {CONTROL: "b", "two namespaces": "b", "one namespace": "a"}
"""The namespace of the attacker; the victim's is ``a``."""


def questions(num: int, seed: int) -> list[str]:
    """Return distinct questions of one kind, in random order."""
    found = [f"I want to book {a} in {b} {c}." for a in THINGS for b in PLACES for c in TIMES]
    random.Random(seed).shuffle(found)
    return found[:num]


class Client:
    """Asks one engine in one namespace."""

    def __init__(self, host: ModelHost, engine: Engine, namespace: str, max_tokens: int) -> None:
        self._host, self._engine = host, engine
        self._namespace = namespace
        self._max_tokens = max_tokens
        self._numbers = itertools.count()

    def ask(self, question: str, *, is_shared: bool) -> tuple[int, float]:
        """Return the number of steps and the seconds of an answer."""
        messages = [{"role": "user", "content": question}]
        seq = core.Sequence(
            f"{self._namespace}/{is_shared}/{next(self._numbers)}",
            self._host.tokenizer.encode_chat(messages, {}),
            SamplingParams(temperature=0.0, max_tokens=self._max_tokens, ignore_eos=True),
            SpeculationParams(is_output_shared=is_shared),
            namespace=self._namespace,
        )
        started_s = time.perf_counter()
        self._engine.add(seq)
        while self._engine.has_work:
            self._engine.step()
        return seq.counts.num_steps, time.perf_counter() - started_s


def area_under_curve(asked: Sequence[float], others: Sequence[float]) -> float:
    """Return how likely what was asked is faster than what was not; ties count half."""
    wins = [(a < b) + 0.5 * (a == b) for a in asked for b in others]
    return statistics.fmean(wins)


def main(
    model: Annotated[str, typer.Option(help="A bundled model or a directory.")] = "hdserve-tiny",
    num_questions: Annotated[int, typer.Option(help="Half of them are asked.", min=4)] = 60,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.", min=2)] = 40,
    seed: Annotated[int, typer.Option(help="Which questions, and in which order.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Measure the channel in one namespace, and across two."""
    config = ModelConfig.model_validate(
        {"name": model, "model": model, "drafting": {"adapts_budget": False}}
    )
    host = ModelHost(config)
    listed = questions(num_questions, seed)
    asked, others = listed[::2], listed[1::2]
    rows: list[dict[str, object]] = []
    control: list[int] = []
    for setting, attacker_namespace in SETTINGS.items():
        engine = host.make_engine()
        host.own_database.clear()
        victim = Client(host, engine, "a", max_tokens)
        attacker = Client(host, engine, attacker_namespace, max_tokens)
        for question in asked if setting != CONTROL else ():
            victim.ask(question, is_shared=True)
        seen = {question: attacker.ask(question, is_shared=False) for question in sorted(listed)}
        steps = [num_steps for num_steps, _ in seen.values()]
        control = control or steps
        row: dict[str, object] = {
            "setting": setting,
            "num_answers_with_other_steps": sum(map(operator.ne, steps, control)),
        }
        for index, name in enumerate(("steps", "seconds")):
            values = [[seen[question][index] for question in part] for part in (asked, others)]
            row[f"median_{name}_asked"], row[f"median_{name}_others"] = map(
                statistics.median, values
            )
            row[f"area_by_{name}"] = area_under_curve(*values)
        rows.append(row)
        typer.echo(json.dumps(row))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"model": model, "num_questions": num_questions, "max_tokens": max_tokens}
        json_path.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

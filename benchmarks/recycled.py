"""What the verifier's own likeliest tokens are worth as a draft source, in tokens per second.

    python benchmarks/recycled.py --prompts prompts60.jsonl --out var/recycled.json

The same prompts with the same weights, interleaved prompt by prompt: plain, the hierarchy drafter
without ``recycled``, and with it, once with trees of 16 whole and once with the budget that serves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from hdserve.bench.contenders import EngineContender, State
from hdserve.bench.engine import run_rounds, summarise
from hdserve.bench.prompts import encode_prompt
from hdserve.bench.task import Decoding, Task
from hdserve.bench.task_names import ALL_TASKS
from hdserve.config import ModelConfig
from hdserve.engine.host import ModelHost
from hdserve.prompts import PromptRow, read_prompts

BUDGET = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["hdserve-tiny", "hdserve-mini"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--states", nargs="+", default=["cold", "online"])
    parser.add_argument("--compile", action="store_true", help="run the models compiled")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(args.prompts)
    rows: list[dict[str, Any]] = []
    print("| model | state | temperature | budget, recycled | tokens/step | to plain (range) |")
    print("|---|---|--:|---|--:|---|")
    for model in args.models:
        for state in args.states:
            for temperature in args.temperatures:
                for row in measure(model, state, temperature, prompts, args):
                    rows.append(row)
                    print_row(row)
                    args.out.write_text(json.dumps(rows, indent=1))


def measure(
    model: str,
    state: str,
    temperature: float,
    prompts: Sequence[PromptRow],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Compare all contenders once, interleaved."""
    contenders: list[EngineContender] = []
    tasks: list[Task] = []
    for adapts in (False, True):
        for recycled in (False, True):
            host = make_host(model, adapts=adapts, recycled=recycled, compiles=args.compile)
            if not contenders:
                longest = host.model.max_model_len - args.max_tokens
                tasks += [
                    Task(row.name, [encode_prompt(row, host.tokenizer, longest)]) for row in prompts
                ]
                contenders.append(
                    EngineContender(
                        "autoregressive", host, is_drafting=False, state=cast("State", state)
                    )
                )
            name = f"{'adapted' if adapts else BUDGET}, {'with' if recycled else 'without'}"
            contenders.append(
                EngineContender(name, host, is_drafting=True, state=cast("State", state))
            )
    decoding = Decoding(1, args.max_tokens, temperature)
    runs = run_rounds(contenders, tasks, decoding, num_rounds=args.rounds)
    return [
        {"model": model, "state": state, **asdict(result)}
        for result in summarise(runs, decoding)
        if result.task == ALL_TASKS
    ]


def make_host(model: str, *, adapts: bool, recycled: bool, compiles: bool) -> ModelHost:
    engine = {
        "dtype": "float32",
        "exact": False,
        "compile": compiles,
        "max_num_sequences": 1,
        "prefix_caching": False,  # every round asks the same prompts again
    }
    drafter = {"name": "hierarchy", "options": {"recycled": recycled}}
    return ModelHost(
        ModelConfig.model_validate(
            {
                "name": model,
                "model": model,
                "engine": engine,
                "drafting": {
                    "max_draft_tokens": BUDGET,
                    "adapts_budget": adapts,
                    "drafters": [drafter],
                },
            }
        )
    )


def print_row(row: dict[str, Any]) -> None:
    ratio = f"{row['ratio_to_autoregressive']:.2f}"
    spread = f"({row['ratio_low']:.2f}..{row['ratio_high']:.2f})"
    print(
        f"| {row['model']} | {row['state']} | {row['temperature']} | {row['contender']} "
        f"| {row['mean_acceptance_length']:.2f} | {ratio} {spread} |",
        flush=True,
    )


if __name__ == "__main__":
    main()

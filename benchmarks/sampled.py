"""What it is worth to draft by the noise of sampled choices, in tokens per step.

    python benchmarks/sampled.py --prompts prompts60.jsonl --out var/sampled.json

The same prompts with the same weights and seeds, so that the answers are the same, drafted by a
hierarchy that does not look at the noise and by one that does, with whole trees of some sizes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hdserve.bench.contenders import EngineContender
from hdserve.bench.engine import run_rounds, summarise
from hdserve.bench.prompts import encode_prompt
from hdserve.bench.task import Decoding, Task
from hdserve.bench.task_names import ALL_TASKS
from hdserve.config import ModelConfig
from hdserve.engine.host import ModelHost
from hdserve.prompts import PromptRow, read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["hdserve-tiny", "hdserve-mini"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.7, 1.0])
    parser.add_argument("--budgets", nargs="+", type=int, default=[2, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(args.prompts)
    rows: list[dict[str, Any]] = []
    print("| model | temperature | budget | without noise | with | accepted a step |")
    print("|---|--:|--:|--:|--:|--:|")
    for model in args.models:
        for budget in args.budgets:
            for temperature in args.temperatures:
                without, using = measure(model, budget, temperature, prompts, args)
                gain = (using - 1) / (without - 1) - 1
                row = {"model": model, "temperature": temperature, "budget": budget}
                rows.append({**row, "without": without, "with": using})
                cells = f"{model} | {temperature} | {budget} | {without:.3f} | {using:.3f}"
                print(f"| {cells} | {100 * gain:+.0f} % |", flush=True)
                args.out.write_text(json.dumps(rows, indent=1))


def measure(
    model: str,
    budget: int,
    temperature: float,
    prompts: Sequence[PromptRow],
    args: argparse.Namespace,
) -> tuple[float, float]:
    """Return the mean acceptance length without and with the noise; the model database is kept from
    prompt to prompt."""
    hosts = [make_host(model, budget, uses_noise=uses) for uses in (False, True)]
    longest = hosts[0].model.max_model_len - args.max_tokens
    tasks = [Task(row.name, [encode_prompt(row, hosts[0].tokenizer, longest)]) for row in prompts]
    contenders = [
        EngineContender(name, host, is_drafting=True, state="online")
        for name, host in zip(("without", "with"), hosts, strict=True)
    ]
    decoding = Decoding(1, args.max_tokens, temperature)
    runs = run_rounds(contenders, tasks, decoding, num_rounds=1)
    found = {
        result.contender: result.mean_acceptance_length
        for result in summarise(runs, decoding)
        if result.task == ALL_TASKS
    }
    return found["without"], found["with"]


def make_host(model: str, budget: int, *, uses_noise: bool) -> ModelHost:
    engine = {
        "dtype": "float32",
        "exact": False,
        "compile": False,
        "max_num_sequences": 1,
        "prefix_caching": False,
    }
    drafter = {"name": "hierarchy", "options": {"noise": uses_noise}}
    drafting = {"max_draft_tokens": budget, "adapts_budget": False, "drafters": [drafter]}
    return ModelHost(
        ModelConfig.model_validate(
            {"name": model, "model": model, "engine": engine, "drafting": drafting}
        )
    )


if __name__ == "__main__":
    main()

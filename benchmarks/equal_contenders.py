"""How far apart equal contenders of `hdserve bench engine` end: what a ratio cannot tell.

    python benchmarks/equal_contenders.py --prompts prompts60.jsonl --batch-size 4 --temperature 1

Two engines that decode plainly and two that draft, each from what it said itself, made in turns and
decoding in turns; each with its ratio to the mean of the plain ones, the median over the rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean, median

from hdserve.bench.contenders import EngineContender
from hdserve.bench.engine import run_rounds
from hdserve.bench.prompts import encode_prompt
from hdserve.bench.task import Decoding, Task
from hdserve.bench.task_names import ALL_TASKS
from hdserve.config import EngineConfig, ModelConfig
from hdserve.engine.host import ModelHost
from hdserve.prompts import read_prompts

KINDS = ("autoregressive", "hierarchy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="hdserve-mini")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prefill-slowdown", type=float, default=2.0)
    args = parser.parse_args()
    engine = EngineConfig(
        compile=True, prefix_caching=False, prefill_slowdown=args.prefill_slowdown
    )
    config = ModelConfig(name=args.model, model=args.model, engine=engine)
    hosts = [ModelHost(config) for _ in range(2)]  # those who draft from one would help each other
    longest = hosts[0].model.max_model_len - args.max_tokens
    rows = read_prompts(args.prompts)
    prompts = [encode_prompt(row, hosts[0].tokenizer, longest) for row in rows]
    contenders = [
        EngineContender(f"{kind} {number}", host, is_drafting=kind == "hierarchy", state="cold")
        for number, host in enumerate(hosts, 1)
        for kind in KINDS
    ]
    decoding = Decoding(args.batch_size, args.max_tokens, args.temperature)
    runs = run_rounds(contenders, [Task(ALL_TASKS, prompts)], decoding, num_rounds=args.rounds)
    speeds = {
        name: [run.num_tokens / run.seconds for run in measured]
        for (name, _), measured in runs.items()
    }
    plain = [values for name, values in speeds.items() if name.startswith("autoregressive")]
    means = [fmean(values) for values in zip(*plain, strict=True)]
    for name, values in sorted(speeds.items()):
        ratio = median(value / mean for value, mean in zip(values, means, strict=True))
        print(f"{name}: {ratio:.3f}")


if __name__ == "__main__":
    main()

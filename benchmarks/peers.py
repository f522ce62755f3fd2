"""hdserve beside vLLM: the same weights, the same prompts, on this machine.

    python -m benchmarks.peers --vllm-python VENV/bin/python --prompts question.jsonl --json OUT

Each engine runs in a process of its own, by its own ``LLM`` and with its own defaults, and is
stopped (SIGSTOP) while another decodes.  The prompts of the file are dealt to as many sets as there
are rounds, and one more to warm up; every engine answers each set once, so what it draws from
earlier answers are answers to other questions.  Ratios are to vLLM without drafts, within a round.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.peer_process import PeerProcess
from hdserve.bench.environment import commit, cpu_name
from hdserve.bench.prompts import encode_prompts, longest_prompt
from hdserve.bench.random_weights import random_model
from hdserve.engine.tokenization.tokenizer import load_tokenizer
from hdserve.errors import ConfigError
from hdserve.models import resolve_model
from hdserve.prompts import PromptRow, read_prompts

MAX_MODEL_LEN = 2048
BASELINE, PLAIN = "vllm", "hdserve-plain"
SPECULATION: Mapping[str, Mapping[str, Any] | None] = {
    BASELINE: None,
    "vllm-ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    "vllm-suffix": {"method": "suffix", "num_speculative_tokens": 32},
}
"""vLLM's contenders.  The parameters of n-grams are those of its documentation."""
CONTENDERS = (*SPECULATION, PLAIN, "hdserve")
VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Gigabytes for keys and values, and the engine in the process that asks it: on two cores 1.6 times
as fast as in one of its own."""


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts contenders by their names.

    Attributes:
        model: a directory.
        preload: ``LD_PRELOAD`` of vLLM.
        package: what vLLM is installed as.
    """

    model: Path
    vllm_python: Path
    package: str
    preload: str
    logs: Path

    def start(self, name: str, batch_size: int) -> PeerProcess:
        """Start a contender that decodes so many sequences together."""
        log = self.logs / f"{name}-{batch_size}.log"
        if name in SPECULATION:
            return self._start_vllm(batch_size, SPECULATION[name], log)
        engine = {
            **{"dtype": "bfloat16", "compile": True, "max_model_len": MAX_MODEL_LEN},
            "max_num_sequences": batch_size,
        }
        options = {"model": str(self.model), "engine": engine, "is_drafting": name != PLAIN}
        return PeerProcess(Path(sys.executable), "hdserve", options, log)

    def _start_vllm(
        self, batch_size: int, speculation: Mapping[str, Any] | None, log: Path
    ) -> PeerProcess:
        options = {
            **{"model": str(self.model), "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN},
            **{"max_num_seqs": batch_size, "gpu_memory_utilization": 0.4},
            **{"speculative_config": speculation, "package": self.package},
        }
        environment = {**VLLM_ENVIRONMENT, "LD_PRELOAD": self.preload}
        return PeerProcess(self.vllm_python, "vllm", options, log, environment)


def chosen(contenders: str) -> list[str]:
    """Return the names of contenders, which are separated by commas.

    Raises:
        ConfigError: one is unknown, or lacks the one that it is compared with.
    """
    names = [*dict.fromkeys(contenders.split(","))]
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise ConfigError(f"--contenders: {unknown[0]!r} is none of {', '.join(CONTENDERS)}")
    needed = {BASELINE} if SPECULATION.keys() >= {*names} else {BASELINE, PLAIN}
    if missing := needed.difference(names):
        raise ConfigError(f"--contenders {contenders}: {min(missing)} is needed for comparison")
    return names


def deal(rows: Sequence[PromptRow], num_sets: int) -> list[Sequence[PromptRow]]:
    """Return disjoint sets, each with about as many of whatever stands together in the file.

    Raises:
        ConfigError: there are fewer rows than sets.
    """
    if len(rows) < num_sets:
        raise ConfigError(f"{num_sets} sets take more than {len(rows)} prompts")
    return [rows[first::num_sets] for first in range(num_sets)]


def run_rounds(
    peers: Mapping[str, PeerProcess], sets: Sequence[Sequence[Sequence[int]]], max_tokens: int
) -> dict[str, list[dict[str, Any]]]:
    """Have every peer answer every set, each round beginning with another; the first set is not
    kept."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    names = deque(peers)
    for prompts in sets:
        for name in names:
            runs[name].append(peers[name].answer(prompts, max_tokens))
        names.rotate(-1)
    return {name: found[1:] for name, found in runs.items()}


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for every contender."""
    for name, own in runs.items():
        ratios = [
            base["seconds"] / run["seconds"] for base, run in zip(runs[BASELINE], own, strict=True)
        ]
        plain = runs[BASELINE if name in SPECULATION else PLAIN]
        yield {
            "contender": name,
            "tokens_per_s": median(sum(map(len, run["outputs"])) / run["seconds"] for run in own),
            "ratio_to_vllm": median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "share_as_without_drafts": _share_equal(plain, own),
        }


def _share_equal(plain: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of answers that have every token of the same engine's without drafts."""
    are_equal = [
        one == other
        for run, other_run in zip(plain, own, strict=True)
        for one, other in zip(run["outputs"], other_run["outputs"], strict=True)
    ]
    return fmean(are_equal)


@contextmanager
def model_directory(model: str, random_weights: str | None) -> Iterator[Path]:
    """Give the directory of a model, or one with random weights of a shape for as long."""
    bundled = Path(resolve_model(model))
    if random_weights is None:
        yield bundled
        return
    with TemporaryDirectory() as made:
        module: Any = random_model(random_weights, torch.bfloat16, torch.device("cpu"))
        module.save_pretrained(made)
        for path in bundled.glob("tokenizer*"):
            shutil.copy(path, made)
        del module
        yield Path(made)


def main(
    vllm_python: Annotated[Path, typer.Option(help="With vLLM for this processor.")],
    prompts: Annotated[Path, typer.Option(help="JSON Lines, as `hdserve bench` reads.")],
    model: Annotated[str, typer.Option(help="A bundled model or a directory.")] = "hdserve-mini",
    random_weights: Annotated[
        str | None, typer.Option(help="A shape; the tokenizer is the model's.")
    ] = None,
    contenders: Annotated[str, typer.Option(help="By commas.")] = ",".join(CONTENDERS),
    batch_sizes: Annotated[str, typer.Option()] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    vllm_package: Annotated[str, typer.Option(help="What it was installed as.")] = "vllm-cpu",
    preload: Annotated[str, typer.Option(help="LD_PRELOAD of vLLM, as its documents ask.")] = "",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and print."""
    names = chosen(contenders)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
    sets = deal(read_prompts(prompts), rounds + 1)
    tokenizer = load_tokenizer(resolve_model(model))
    longest = longest_prompt(MAX_MODEL_LEN, max_tokens)
    encoded = [[row.token_ids for row in encode_prompts(one, tokenizer, longest)] for one in sets]
    results = []
    with model_directory(model, random_weights) as directory, TemporaryDirectory() as logs:
        starter = Starter(directory, vllm_python, vllm_package, preload, Path(logs))
        for batch_size in (int(size) for size in batch_sizes.split(",")):
            with ExitStack() as stack:
                peers = {
                    name: stack.enter_context(starter.start(name, batch_size)) for name in names
                }
                runs = run_rounds(peers, encoded, max_tokens)
            for row in summary(runs):
                version = peers[row["contender"]].version
                results.append({"batch_size": batch_size, **row, "version": version})
                print(results[-1])
    found = {
        "results": results,
        **{"model": model, "random_weights": random_weights, "rounds": rounds},
        **{"max_tokens": max_tokens, "preload": preload, "prompts": prompts.name},
        **{"commit": commit(), "hardware": cpu_name()},
    }
    Console().print_json(json.dumps(found))
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

"""hdserve beside vLLM: the same weights, the same prompts, on this machine.

    python -m benchmarks.peers --vllm-python VENV/bin/python --prompts question.jsonl --json OUT

Each engine runs in a process of its own, by its own ``LLM`` and with its own defaults, and is
stopped (SIGSTOP) while another decodes.  The prompts of the file are dealt to as many sets as there
are rounds, and one more to warm up; every engine answers each set
once, so what it draws from earlier answers are answers to other questions.  Ratios are to vLLM
without drafts, within a round.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hdserve.bench.environment import commit, cpu_name
from hdserve.bench.prompts import encode_prompts, longest_prompt
from hdserve.bench.random_weights import random_model
from hdserve.engine.tokenizer import load_tokenizer
from hdserve.errors import ConfigError
from hdserve.models import resolve_model
from hdserve.prompts import PromptRow, read_prompts

MAX_MODEL_LEN = 2048
BASELINE = "vLLM"
LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
"""As vLLM's documentation has it."""
SUFFIX = {"method": "suffix", "num_speculative_tokens": 32}
VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Room for keys and values, and the engine in the process that asks it: on two cores 1.6 times as
fast as in a process of its own."""


class Peer:
    """A process of :mod:`benchmarks.peer_engine`, stopped but for its turns."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            env={**os.environ, **environment},
            text=True,
            start_new_session=True,
        )
        self._log = log
        self.version: str = self._read()["version"]
        self._signal(signal.SIGSTOP)

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Return how many ``seconds`` the answers to ``prompts`` took, and the ``outputs``."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        batch = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        print(json.dumps(batch), file=self._process.stdin, flush=True)
        found = self._read()
        self._signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        """
        Raises:
            ConfigError: the process has ended; says what it printed last.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise ConfigError(f"{self.name} ended:\n{last}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _signal(self, number: int) -> None:
        """Tell it and what it has started."""
        os.killpg(self._process.pid, number)


class Line:
    """The contenders: what starts each.

    Args:
        model: a directory.
    """

    def __init__(self, model: Path, vllm_python: Path, vllm_package: str, preload: str) -> None:
        self._model = str(model)
        self._vllm_python = vllm_python
        self._vllm_package = vllm_package
        self._vllm_environment = {**VLLM_ENVIRONMENT, "LD_PRELOAD": preload}

    def start(self, name: str, batch_size: int, log: Path) -> Peer:
        """Start the contender ``name``, to decode so many sequences together."""
        if name.startswith("hdserve"):
            engine = {
                **{"dtype": "bfloat16", "compile": True, "max_model_len": MAX_MODEL_LEN},
                "max_num_sequences": batch_size,
            }
            is_drafting = name == "hdserve"
            options = {"model": self._model, "engine": engine, "is_drafting": is_drafting}
            return Peer(name, self._command(Path(sys.executable), "hdserve", options), {}, log)
        options = {
            **{"model": self._model, "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN},
            **{"max_num_seqs": batch_size, "gpu_memory_utilization": 0.4},
            "package": self._vllm_package,
        }
        speculative = {"vLLM, ngram": LOOKUP, "vLLM, suffix": SUFFIX}
        if name in speculative:
            options["speculative_config"] = speculative[name]
        command = self._command(self._vllm_python, "vllm", options)
        return Peer(name, command, self._vllm_environment, log)

    def _command(self, python: Path, kind: str, options: Mapping[str, Any]) -> list[str]:
        script = Path(__file__).with_name("peer_engine.py")
        return [str(python), str(script), kind, json.dumps(options)]


def deal(rows: Sequence[PromptRow], num_sets: int) -> list[Sequence[PromptRow]]:
    """Return disjoint sets, each with about as many of whatever stands together in the file.

    Raises:
        ConfigError: there are fewer rows than sets.
    """
    if len(rows) < num_sets:
        raise ConfigError(f"{num_sets} sets take more than {len(rows)} prompts")
    return [rows[first::num_sets] for first in range(num_sets)]


def run_rounds(
    peers: Sequence[Peer], sets: Sequence[Sequence[Sequence[int]]], max_tokens: int
) -> dict[str, list[dict[str, Any]]]:
    """Have every peer answer every set, each round beginning with another; the first set is not
    kept."""
    runs: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
    for number, prompts in enumerate(sets):
        first = number % len(peers)
        for peer in [*peers[first:], *peers[:first]]:
            runs[peer.name].append(peer.answer(prompts, max_tokens))
    return {name: found[1:] for name, found in runs.items()}


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for every contender."""
    for name, own in runs.items():
        ratios = [
            base["seconds"] / run["seconds"] for base, run in zip(runs[BASELINE], own, strict=True)
        ]
        plain = runs[BASELINE if name.startswith(BASELINE) else "hdserve, no drafts"]
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
    contenders: Annotated[str, typer.Option(help="By semicolons.")] = (
        "vLLM;vLLM, ngram;hdserve, no drafts;hdserve"
    ),
    batch_sizes: Annotated[str, typer.Option()] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    vllm_package: Annotated[str, typer.Option(help="What it was installed as.")] = "vllm-cpu",
    preload: Annotated[str, typer.Option(help="LD_PRELOAD of vLLM, as its documents ask.")] = "",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and print."""
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
    sets = deal(read_prompts(prompts), rounds + 1)
    tokenizer = load_tokenizer(resolve_model(model))
    longest = longest_prompt(MAX_MODEL_LEN, max_tokens)
    encoded = [[row.token_ids for row in encode_prompts(one, tokenizer, longest)] for one in sets]
    results = []
    with model_directory(model, random_weights) as directory, TemporaryDirectory() as logs:
        line = Line(directory, vllm_python, vllm_package, preload)
        for batch_size in (int(size) for size in batch_sizes.split(",")):
            with ExitStack() as stack:
                peers = []
                for name in contenders.split(";"):
                    peers.append(line.start(name, batch_size, Path(logs) / f"{name}.log"))
                    stack.callback(peers[-1].close)
                runs = run_rounds(peers, encoded, max_tokens)
            versions = {peer.name: peer.version for peer in peers}
            for row in summary(runs):
                row |= {"batch_size": batch_size, "version": versions[row["contender"]]}
                print(row)
                results.append(row)
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

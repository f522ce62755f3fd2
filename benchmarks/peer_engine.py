"""One engine in a process of its own, for :mod:`benchmarks.peers`.

    PYTHON benchmarks/peer_engine.py KIND OPTIONS

reads batches as lines of JSON, ``{"prompts": [[5, 9, ...], ...], "max_tokens": 128}``, and answers
each with ``{"seconds": 1.5, "outputs": [[7, ...], ...]}``: greedy answers, all of just so many
tokens, and how long they took together.  Before the first it says which version it is.  Only the
library of the engine is needed, so this runs with the Python of a peer, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any, Protocol, TextIO


class PeerEngine(Protocol):
    """An engine's own offline interface."""

    version: str

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]: ...


class Hdserve:
    """hdserve by its ``LLM``."""

    version = "hdserve"

    def __init__(self, options: dict[str, Any]) -> None:
        from hdserve import LLM, SpeculationParams

        is_drafting = options.pop("is_drafting")
        self._llm = LLM(**options)
        self._speculation = SpeculationParams(is_enabled=is_drafting, is_output_shared=is_drafting)

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = self._llm.sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        answers = self._llm.generate(prompts, params, self._speculation)
        return [answer.token_ids for answer in answers]


class Vllm:
    """vLLM by its ``LLM``."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        self.version = f"vLLM {version(options.pop('package'))}"
        self._llm = LLM(**options)

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._llm.generate(asked, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


KINDS: dict[str, type[Any]] = {"hdserve": Hdserve, "vllm": Vllm}


def serve(engine: PeerEngine, answers: TextIO) -> None:
    """Answer the batches of standard input."""
    print(json.dumps({"version": engine.version}), file=answers, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        started = time.perf_counter()
        outputs = engine.answer(batch["prompts"], batch["max_tokens"])
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "outputs": outputs}), file=answers, flush=True)


def main() -> None:
    """Keep standard output for answers; what engines print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, options = sys.argv[1:]
    serve(KINDS[kind](json.loads(options)), answers)


if __name__ == "__main__":
    main()

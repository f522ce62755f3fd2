"""Time to the first token of a conversation's turns, with and without its prefix in the KV cache.

    python benchmarks/prefix_reuse.py --model hdserve-tiny --history-tokens 1500

A document and five messages about it, so that the last one has a history of the given length.  In
the same rounds, interleaved: the request of each turn with the prefix cache, without it, and one
that holds only the new message.  Answers with and without the cache are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping

from hdserve.bench.environment import commit, cpu_name
from hdserve.config import ModelConfig
from hdserve.core import SamplingParams, Sequence
from hdserve.engine.engine import Engine
from hdserve.engine.host import ModelHost

NUM_TURNS = 5
NUM_MESSAGE_TOKENS = 64
NUM_ANSWER_TOKENS = 16


def ask(engine: Engine, name: str, tokens: list[int]) -> tuple[float, Sequence]:
    """Return the milliseconds until the first token of the answer, and the whole sequence."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True)
    seq = Sequence(name, list(tokens), params)
    started = time.perf_counter()
    engine.add(seq)
    first_s = None
    while engine.has_work:
        if engine.step() and first_s is None:
            first_s = time.perf_counter() - started
    assert first_s is not None
    return 1e3 * first_s, seq


def text(number: int, length: int, vocab_size: int) -> list[int]:
    """Return token ids of no particular meaning, other ones for every ``number``."""
    return [(number * 104729 + index * 7919 + 13) % vocab_size for index in range(length)]


def make_host(arguments: argparse.Namespace, *, is_caching: bool) -> ModelHost:
    """Return the model with the prefix cache, or without it."""
    engine = {
        "prefix_caching": is_caching,
        "exact": arguments.exact,
        "compile": arguments.compile,
        "max_num_sequences": 4,
        "num_threads": 1,
    }
    model = arguments.model
    return ModelHost(ModelConfig.model_validate({"name": model, "model": model, "engine": engine}))


def measure(
    hosts: Mapping[str, ModelHost], num_rounds: int, num_document_tokens: int
) -> tuple[dict[tuple[str, int], list[float]], list[bool]]:
    """Return the milliseconds to the first token by way and turn, and whether the answers were
    equal."""
    vocab_size = hosts["cold"].model.vocab_size
    engines = {name: host.make_engine() for name, host in hosts.items()}
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    equal = []
    for number in range(num_rounds):
        history = text(-1 - number, num_document_tokens, vocab_size)
        for turn in range(NUM_TURNS):
            new = text(number * NUM_TURNS + turn, NUM_MESSAGE_TOKENS, vocab_size)
            took, _ = ask(engines["cold"], "alone", new)
            times["only the new message", turn].append(took)
            prompt = [*history, *new]
            answers = []
            for name, engine in engines.items():
                took, seq = ask(engine, name, prompt)
                times[name, turn].append(took)
                answers.append(seq.output_token_ids)
            equal.append(answers[0] == answers[1])
            history = [*prompt, *answers[0]]
    return times, equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="hdserve-tiny")
    parser.add_argument("--history-tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    hosts = {name: make_host(arguments, is_caching=name == "reused") for name in ("reused", "cold")}
    num_turn_tokens = NUM_MESSAGE_TOKENS + NUM_ANSWER_TOKENS
    num_document_tokens = arguments.history_tokens - (NUM_TURNS - 1) * num_turn_tokens
    times, equal = measure(hosts, arguments.rounds, num_document_tokens)
    result = {
        "model": arguments.model,
        "exact": arguments.exact,
        "compiled": arguments.compile,
        "hardware": cpu_name(),
        "commit": commit(),
        "equal answers": f"{sum(equal)}/{len(equal)}",
        "first token, ms, median by turn": {
            name: [round(statistics.median(times[name, turn]), 1) for turn in range(NUM_TURNS)]
            for name in ("reused", "cold", "only the new message")
        },
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""How many sampled choices change with the last bits of the logits, by a race and by inverting the
cumulative distribution.

    python benchmarks/rounded_choices.py

Logits are normally distributed, and so is what is added to them.
"""

from __future__ import annotations

import argparse

import torch

from hdserve.core import SamplingParams
from hdserve.engine.sampling.sampler import choose, filtered_probabilities
from hdserve.noise import position_key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[8192, 152_064])
    parser.add_argument("--spread", type=float, default=3.0, help="of the logits")
    parser.add_argument("--errors", nargs="+", type=float, default=[0.0001, 0.001, 0.01])
    parser.add_argument("--rows", type=int, default=20_000)
    args = parser.parse_args()
    print("| vocabulary | error of a logit | changed by a race | by inverting |")
    print("|--:|--:|--:|--:|")
    for vocab_size in args.vocab_sizes:
        for error in args.errors:
            race, inverted = changed(vocab_size, args.spread, error, args.rows)
            print(f"| {vocab_size:,} | {error} | {race:.3%} | {inverted:.3%} |", flush=True)


def changed(vocab_size: int, spread: float, error: float, num_rows: int) -> tuple[float, float]:
    """Return the shares of the choices that rounding changed: by the race, and by inverting the
    distribution."""
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams()
    num_by_race = num_inverted = 0
    for row in range(num_rows):
        exact = spread * torch.randn(1, vocab_size, generator=generator)
        rounded = exact + error * torch.randn(1, vocab_size, generator=generator)
        key = position_key(0, row)
        first, second = (choose(logits, params, [key]) for logits in (exact, rounded))
        num_by_race += int(first) != int(second)
        draw = torch.rand(1, 1, generator=generator, dtype=torch.float64)
        first, second = (_inverted(logits, params, draw) for logits in (exact, rounded))
        num_inverted += int(first) != int(second)
    return num_by_race / num_rows, num_inverted / num_rows


def _inverted(logits: torch.Tensor, params: SamplingParams, draw: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative probability is above ``draw``."""
    cumulative = filtered_probabilities(logits, params).cumsum(dim=-1)
    return torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)


if __name__ == "__main__":
    main()

"""Prompts in the model database of a replay."""

from __future__ import annotations

import numpy as np
import pytest

from hdserve.bench.prompt_sharing import PROMPT_SHARE, PromptSharingDatabase
from hdserve.core import SamplingParams, Sequence, SpeculationParams
from hdserve.databases.model import MAX_COUNTED_TOKENS


def _sequence(prompt: list[int], output: list[int], *, is_shared: bool = True) -> Sequence:
    speculation = SpeculationParams(is_output_shared=is_shared)
    seq = Sequence("r", list(prompt), SamplingParams(), speculation)
    seq.token_ids += output
    return seq


def test_repeated_histories_are_left_out() -> None:
    """The second turn of a conversation adds only what is new in its prompt."""
    database = PromptSharingDatabase()
    history = list(range(1000, 1064))
    database.record(_sequence(history, [1, 2]))
    database.record(_sequence([*history, 1, 2, 7, 8], [3]))
    assert database.num_tokens == 64 + 2 + 4 + 1


def test_what_is_not_shared_stays_out() -> None:
    database = PromptSharingDatabase()
    database.record(_sequence([1, 2, 3], [4], is_shared=False))
    assert database.num_tokens == 0


def test_texts_come_in_the_order_in_which_they_ended() -> None:
    """However many short prompts and outputs there are, and after a long one."""
    database = PromptSharingDatabase(8 << 20)
    texts = [[7], [5] * (2 * MAX_COUNTED_TOKENS), *([number] for number in range(1000))]
    for prompt, output in zip(texts[::2], texts[1::2], strict=True):
        database.record(_sequence(prompt, output))
    partition = database.partition("default")
    assert partition is not None
    assert partition.texts_since(0)[1:] == texts


@pytest.mark.parametrize("num_namespaces", [1, 3])
def test_what_is_remembered_of_prompts_is_bounded(num_namespaces: int) -> None:
    """However many there are; the last one is still known."""
    max_bytes = 1 << 20
    database = PromptSharingDatabase(max_bytes)
    rng = np.random.default_rng(4)
    prompts = rng.integers(0, 30_000, (1500, 320)).tolist()
    for number, prompt in enumerate(prompts):
        database.insert_prompt(f"n-{number % num_namespaces}", prompt)
        assert database.num_bytes <= max_bytes + max_bytes // PROMPT_SHARE
    num_tokens = database.num_tokens
    database.insert_prompt(f"n-{(len(prompts) - 1) % num_namespaces}", [*prompts[-1], 1])
    assert database.num_tokens == num_tokens + 1


def test_a_flushed_namespace_is_known_no_more() -> None:
    """Nor one that was dropped: what was said there before is said anew."""
    database = PromptSharingDatabase()
    prompt = list(range(64))
    for namespace in ("a", "b"):
        database.insert_prompt(namespace, prompt)
    num_bytes = database.num_bytes
    database.clear("a")
    database.insert_prompt("a", prompt)
    assert database.num_tokens == 2 * 64
    assert database.num_bytes == num_bytes
    database.clear()
    assert database.num_bytes == 0

"""Every drafter one can configure, with databases that know the answers: tokens stay the same."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hdserve import core
from hdserve.config import DrafterConfig, DraftingConfig, ModelConfig
from hdserve.core import SpeculationParams
from hdserve.databases.model import ModelDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.drafting.base import Drafter, DraftResources
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.drafting.registry import DRAFTERS, build_drafters, known_drafters
from hdserve.engine.host import ModelHost
from tests.chaos.drafter import NAME, install
from tests.drafters import DATABASES, only
from tests.engines import make_engine, make_prompt, make_sequence, plain_tokens, run
from tests.models import VOCAB_SIZE, make_model
from tests.sampling import SAMPLING

NAMES = [*sorted(known_drafters()), *DATABASES]
"""Those of entry points, too, where a package that has some is installed; and databases alone."""

FEW_SETTINGS = ("greedy", "all filters", "everything")
CASES = [
    pytest.param(
        name,
        setting,
        marks=() if name == "hierarchy" or setting in FEW_SETTINGS else pytest.mark.slow,
        id=f"{name}-{setting}",
    )
    for name in NAMES
    for setting in SAMPLING
]


def _build(name: str, outputs: list[list[int]]) -> Drafter:
    """The drafter ``name``, or ``hierarchy`` with the database ``name`` alone; the model generated
    the first half of ``outputs`` before, the corpus holds the rest, and each of ``draft_from`` all
    of them but their beginnings."""
    half = len(outputs) // 2
    model_database, other = ModelDatabase(1 << 22), ModelDatabase(1 << 22)
    model_database.apply("default", outputs[:half])
    other.apply("default", [output[6:] for output in outputs])
    builder = StatisticsBuilder("t", VOCAB_SIZE, max_bytes=1 << 20)
    for output in outputs[half:]:
        builder.add("corpus", output)
    resources = DraftResources(VOCAB_SIZE, model_database, builder.finish(), (other,))
    if name in DATABASES:
        return Hierarchy(resources, only(name))
    config = DraftingConfig(drafters=(DrafterConfig(name=name),))
    return build_drafters(config, resources)[0]


def _sequences(setting: str) -> list[core.Sequence]:
    return [
        make_sequence(
            f"{prompt}/{seed}",
            make_prompt(4 + 15 * prompt, prompt),
            seed=seed,
            **{"max_tokens": 16, **SAMPLING[setting]},
        )
        for prompt in range(2)
        for seed in range(3)
    ]


@cache
def _plain_tokens(setting: str) -> dict[str, list[int]]:
    """Which are the same beside all drafters."""
    return plain_tokens(make_model(), _sequences(setting))


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_drafted_equals_plain(name: str, setting: str) -> None:
    """Two prompts with three seeds in one batch; each is equal to itself alone and plain."""
    sequences, wanted = _sequences(setting), _plain_tokens(setting)
    outputs = [wanted[seq.request_id][len(seq.token_ids) :] for seq in sequences]
    drafter = _build(name, outputs)
    run(make_engine([drafter], max_num_sequences=4), sequences)
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted
    assert sum(seq.counts.num_draft_tokens for seq in sequences) > 0


@pytest.mark.parametrize("name", [*DRAFTERS, "context", "model", "statistics"])
def test_accepts(name: str) -> None:
    """A text that repeats itself, was said before and stands in the corpus is drafted by all."""
    model = make_model()
    cycle = make_prompt(5, 3) * 6
    bias = dict.fromkeys(cycle, 60.0)
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "logit_bias": bias}
    wanted = plain_tokens(model, [make_sequence("a", cycle, **options)])["a"]
    seq = make_sequence("a", cycle, **options)
    drafter = _build(name, [wanted[len(cycle) :]] * 4)
    run(make_engine([drafter], model=model), [seq])
    assert seq.token_ids == wanted
    assert seq.counts.num_accepted_tokens >= 10


def test_accepts_what_was_thought_before() -> None:
    """The ``recycled`` source needs no text, but a model that is asked the same once more."""
    model = make_model()
    prompt = make_prompt(9)
    drafter = _build("recycled", [])
    engine = make_engine([drafter], model=model)
    first, second = (
        make_sequence(name, prompt, temperature=0.0, max_tokens=40) for name in ("a", "b")
    )
    run(engine, [first])
    run(engine, [second])
    assert first.token_ids == second.token_ids
    assert second.counts.num_accepted_tokens >= 20


def test_drafters_of_entry_points_are_among_them(tmp_path: Path) -> None:
    """One's own source is tried, as all of ``NAMES``, as soon as its package is installed."""
    path = os.pathsep.join([str(install(tmp_path)), *sys.path])
    program = "from hdserve.drafting.registry import known_drafters; print(*known_drafters())"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert NAME in found.stdout.split()


@pytest.mark.parametrize("bundled", ["hdserve-tiny", "hdserve-mini"])
def test_bundled_model_in_float32(bundled: str) -> None:
    """The models that ship, as they are served: drafted equals plain, cold and warm."""
    engine_options = {
        "dtype": "float32",
        "exact": True,
        "kv_cache_tokens": 2048,
        "max_num_sequences": 4,
        "prefill_chunk_tokens": 64,
    }
    drafting = {"adapts_budget": False}
    config = {"name": bundled, "model": bundled, "engine": engine_options, "drafting": drafting}
    host = ModelHost(ModelConfig.model_validate(config), max_database_bytes=1 << 22)
    engine = host.make_engine()
    texts = ("Can you find me a hotel in Paris?", "Explain what a list is.", "Hello!")
    prompts = [
        host.tokenizer.encode_chat([{"role": "user", "content": text}], {}) for text in texts
    ]

    def answers(*, is_drafted: bool) -> list[core.Sequence]:
        speculation = SpeculationParams(is_enabled=is_drafted, is_output_shared=is_drafted)
        sequences = [
            make_sequence(str(index), prompt, speculation, seed=index, temperature=0.5 * index)
            for index, prompt in enumerate(prompts)
        ]
        run(engine, sequences)
        return sequences

    plain = [seq.token_ids for seq in answers(is_drafted=False)]
    for _ in range(2):
        drafted = answers(is_drafted=True)
        assert [seq.token_ids for seq in drafted] == plain
    assert sum(seq.counts.accepted_by_source.get(core.Source.MODEL, 0) for seq in drafted) > 0

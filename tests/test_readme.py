"""What the README shows works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hdserve.config import load_config
from hdserve.drafting.base import Drafter
from tests.documents import ROOT, measured, texts
from tests.engines import make_engine, make_prompt, make_sequence, plain_tokens, run
from tests.models import make_model

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_configuration_is_one(tmp_path: Path) -> None:
    (text,) = texts("README.md", "yaml")
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    assert [model.name for model in load_config(path).models] == [
        model["name"] for model in yaml.safe_load(text)["models"]
    ]


@pytest.mark.parametrize(
    ("cpu", "page", "model"),
    [
        ("two cores with AMX, bfloat16", "docs/results/engine-amx.md", "hdserve-tiny"),
        ("", "docs/results/engine-amx.md", "hdserve-mini"),
        ("two Zen 4 cores, bfloat16", "docs/results/engine-zen4.md", "hdserve-tiny"),
        ("", "docs/results/engine-zen4.md", "hdserve-mini"),
        ("one AVX-512 core, float32", "docs/results/engine-float32.md", "hdserve-tiny"),
        ("", "docs/results/engine-float32.md", "hdserve-mini"),
    ],
)
def test_the_figures_are_those_of_the_page(cpu: str, page: str, model: str) -> None:
    found = measured(page, "Cold, batch 1", model)
    contenders = ("transformers", "transformers-prompt-lookup", "autoregressive", "hierarchy")
    *before, last = [f"{int(found[name][0]):,}" for name in contenders]
    gain = int(found["hierarchy"][0]) / int(found["transformers"][0])
    row = rf"^\| {cpu} ?\| {model} \| {' [|] '.join(before)} \| \*\*{last}\*\*, {gain:.1f} times"
    assert re.search(row, README, re.MULTILINE), row


def test_the_draft_source_drafts() -> None:
    (program,) = [block for block in texts("README.md", "python") if "(Drafter)" in block]
    names: dict[str, Any] = {"__name__": "example"}
    exec(program, names)
    drafter: Drafter = names["RepeatDrafter"]()
    model = make_model()
    options: dict[str, Any] = {"logit_bias": {7: 100.0}, "temperature": 0.0}
    seq = make_sequence("a", make_prompt(8), **options)
    wanted = plain_tokens(model, [seq])["a"]
    run(make_engine([drafter], model=model), [seq])
    assert seq.token_ids == wanted
    assert seq.counts.num_accepted_tokens > 10

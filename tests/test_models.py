"""The models that ship in the package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hdserve.databases.statistics import StatisticsDatabase
from hdserve.engine.tokenization.tokenizer import load_tokenizer
from hdserve.models import bundled_model_path, bundled_models, bundled_statistics

MODELS = {"hdserve-mini": 2_254_464, "hdserve-tiny": 8_524_032}


def test_both_models_are_bundled() -> None:
    assert bundled_models() == tuple(sorted(MODELS))
    assert bundled_model_path("no-such-model") is None


@pytest.mark.parametrize("name", MODELS)
def test_a_bundled_model_loads_and_answers(name: str) -> None:
    path = bundled_model_path(name)
    assert path is not None
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == MODELS[name]
    assert model.config.max_position_embeddings == 2048
    tokenizer = AutoTokenizer.from_pretrained(path)
    question = [{"role": "user", "content": "Hello!"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")
    output = model.float().generate(**prompt, max_new_tokens=100)
    answer = output[0, prompt["input_ids"].shape[1] :].tolist()
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer, skip_special_tokens=True).strip()


@pytest.mark.parametrize("name", MODELS)
def test_a_bundled_model_is_small_and_has_a_card(name: str) -> None:
    path = bundled_model_path(name)
    assert path is not None
    assert sum(file.stat().st_size for file in path.iterdir()) < 24_000_000
    card = (path / "README.md").read_text(encoding="utf-8")
    for licence in ("Apache-2.0", "CC-BY-SA-4.0", "CC-BY-4.0", "MIT", "PSF-2.0"):
        assert licence in card
    assert "ot for real use" in card


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_the_models_share_one_tokenizer(file: str) -> None:
    contents = set()
    for name in MODELS:
        path = bundled_model_path(name)
        assert path is not None
        contents.add((path / file).read_bytes())
    assert len(contents) == 1


def test_a_statistics_database_of_their_tokenizer_ships() -> None:
    (directory,) = bundled_statistics()
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 8_000_000
    tokenizer = load_tokenizer("hdserve-tiny")
    database = StatisticsDatabase.open(directory, tokenizer=tokenizer.fingerprint)
    card = (directory / "README.md").read_text(encoding="utf-8")
    for corpus in database.info.corpora:
        row = f"| {corpus.name} | {corpus.num_texts:,} | {corpus.num_tokens:,} |"
        assert f"{row} {', '.join(corpus.licences)} |" in card
        assert corpus.licences


def test_finding_models_imports_no_torch() -> None:
    program = "import sys, hdserve.models as m; m.bundled_models(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"

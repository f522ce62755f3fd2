"""A statistics database larger than what is checked when it is opened, and a model that has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hdserve.config import ModelConfig
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_info import TABLE_NAME
from hdserve.engine.tokenization.tokenizer import load_tokenizer

MODEL = "hdserve-mini"


def write(directory: Path, *, is_damaged: bool = False) -> Path:
    """Write it, with damage where it is not checked when it is opened, or none."""
    tokenizer = load_tokenizer(MODEL)
    builder = StatisticsBuilder(tokenizer.fingerprint, tokenizer.vocab_size, max_bytes=8 << 20)
    text = np.random.default_rng(0).integers(0, tokenizer.vocab_size, 20_000)
    builder.add("test", text.tolist())
    builder.write(directory)
    if is_damaged:
        with (directory / TABLE_NAME).open("r+b") as table:
            table.seek(3 << 20)
            table.write(b"\1\2\3")
    return directory


def model_with(directory: Path) -> ModelConfig:
    """The configuration of a model whose statistics are in ``directory``."""
    return ModelConfig.model_validate(
        {
            "name": MODEL,
            "model": MODEL,
            "statistics": str(directory),
            "engine": {"exact": False, "kv_cache_tokens": 1024},
            "drafting": {"adapts_budget": False},
        }
    )

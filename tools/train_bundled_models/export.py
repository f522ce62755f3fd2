"""The trained model as a Hugging Face directory."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from tools.train_bundled_models.chat import END_OF_TEXT
from tools.train_bundled_models.training import TrainingRun
from tools.train_bundled_models.workspace import copy_tokenizer

TRAINING_RECORD = "training.json"


def export(
    run: TrainingRun, tokenizer: PreTrainedTokenizerBase, tokenizer_directory: Path, output: Path
) -> None:
    """Write weights (bfloat16 safetensors), tokenizer, chat template and generation defaults.

    Args:
        run: its model is copied, so training can go on.
        tokenizer: the tokenizer of the run.
        tokenizer_directory: where it was loaded from; its files are copied byte for byte.
        output: the directory to write, created if it is missing.
    """
    model = copy.deepcopy(run.model).to(device="cpu", dtype=torch.bfloat16).eval()
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
        pad_token_id=tokenizer.pad_token_id,
    )
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    for weights in output.glob("*.safetensors"):
        weights.chmod(0o644)  # safetensors makes files that only their owner can read
    copy_tokenizer(tokenizer_directory, output)
    record = {
        "settings": json.loads(run.settings.model_dump_json()),
        "steps": run.step,
        "tokens": run.step * run.settings.tokens_per_step,
        "training_s": round(run.elapsed_s),
    }
    text = json.dumps(record, indent=2) + "\n"
    (output / TRAINING_RECORD).write_text(text, encoding="utf-8")

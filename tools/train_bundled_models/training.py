"""The training loop: resumable, on a CPU or a CUDA device."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from hdserve.engine.hardware.devices import multiplies_bfloat16
from tools.train_bundled_models.optimizers import build_optimizers
from tools.train_bundled_models.packing import BatchSampler, PackedCorpus
from tools.train_bundled_models.settings import SHAPES, Device, TrainingSettings


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the last step did."""

    step: int
    """Steps done."""

    num_tokens: int
    """Tokens trained on so far."""

    loss: float
    """Nats per token of this step's batch."""

    learning_rate: float
    elapsed_s: float
    """Training time, earlier runs from the same checkpoint included."""


class TrainingRun:
    """A model in training; everything that changes is in its checkpoint.

    Args:
        settings: the run begins at step 0 with weights drawn from their seed.
        tokenizer: gives the vocabulary and the special tokens.
        device: where to train.
        compile_model: fuse the forward pass and the loss (1.5 times the speed on a CPU).
    """

    def __init__(
        self,
        settings: TrainingSettings,
        tokenizer: PreTrainedTokenizerBase,
        device: Device = "cpu",
        compile_model: bool = False,
    ) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.device = device
        self.model = LlamaForCausalLM(SHAPES[settings.size].llama_config(tokenizer)).to(device)
        self.model.train()
        self.optimizers = build_optimizers(self.model, settings)
        self.step = 0
        self.elapsed_s = 0.0
        self.drawn_tokens: dict[str, int] = {}
        self._loss = torch.compile(self.loss, dynamic=False) if compile_model else self.loss

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of rows of ``length + 1`` token ids, in nats per token."""
        hidden = self.model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        return functional.linear_cross_entropy(
            hidden.flatten(0, 1), self.model.lm_head.weight, tokens[:, 1:].flatten()
        )

    def train(self, corpus: PackedCorpus) -> Iterator[StepReport]:
        """Train to the end of the schedule, reporting every step."""
        settings = self.settings
        sampler = BatchSampler(
            corpus.streams["train"], settings.mixture, settings.seed, self.drawn_tokens
        )
        while self.step < settings.num_steps:
            started = time.monotonic()
            length = settings.length_tokens(self.step)
            num_rows = max(1, settings.tokens_per_step // length)
            batch = torch.from_numpy(sampler.batch(num_rows, length)).to(self.device)
            learning_rate = settings.learning_rate_at(self.step)
            loss = self._update(batch, learning_rate)
            self.step += 1
            self.elapsed_s += time.monotonic() - started
            num_tokens = self.step * settings.tokens_per_step
            yield StepReport(self.step, num_tokens, loss, learning_rate, self.elapsed_s)

    def save(self, path: Path) -> None:
        """Write a checkpoint; a crash leaves the former one."""
        partial = path.with_suffix(".partial")
        state = {
            "settings": self.settings.model_dump_json(),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "drawn_tokens": self.drawn_tokens,
        }
        torch.save(state, partial)
        os.replace(partial, path)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            ValueError: the checkpoint was written with other settings.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["settings"] != self.settings.model_dump_json():
            raise ValueError(f"{path} was written with other settings: {state['settings']}")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self.elapsed_s = state["elapsed_s"]
        self.drawn_tokens = state["drawn_tokens"]

    def _update(self, batch: torch.Tensor, learning_rate: float) -> float:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        with _autocast(self.device):
            loss = self._loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_gradient_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())


def _autocast(device: Device) -> AbstractContextManager[Any]:
    if multiplies_bfloat16(torch.device(device)):
        return torch.autocast(device, dtype=torch.bfloat16)
    return nullcontext()

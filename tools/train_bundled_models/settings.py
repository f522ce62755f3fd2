"""What a training run depends on; stored with its checkpoints and with the exported model."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from transformers import LlamaConfig, PreTrainedTokenizerBase

from hdserve.config import StrictModel

Size = Literal["mini", "tiny"]
Device = Literal["cpu", "cuda"]
Optimizer = Literal["adamw", "muon"]

MAX_POSITIONS = 2048
"""The longest sequence of the models, in tokens."""


class Shape(StrictModel):
    """Dimensions of a Llama model with tied embeddings and heads of 64."""

    width: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    feed_forward: PositiveInt

    def llama_config(self, tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
        """Return the transformers configuration, for the vocabulary of ``tokenizer``."""
        return LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.width,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            head_dim=64,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )


SHAPES: dict[Size, Shape] = {
    "mini": Shape(width=128, num_layers=6, num_heads=2, feed_forward=352),
    "tiny": Shape(width=256, num_layers=8, num_heads=4, feed_forward=704),
}


class Stage(StrictModel):
    """A part of the run with rows of one length."""

    fraction: PositiveFloat
    """Share of all training tokens."""

    length_tokens: PositiveInt


class TrainingSettings(StrictModel):
    """Everything that decides the weights besides the text, the device and its arithmetic."""

    size: Size
    total_tokens: PositiveInt
    seed: int = 0

    tokens_per_step: PositiveInt = 4096
    stages: tuple[Stage, ...] = (
        Stage(fraction=0.80, length_tokens=256),
        Stage(fraction=0.12, length_tokens=1024),
        Stage(fraction=0.08, length_tokens=MAX_POSITIONS),
    )
    """Short rows are cheaper; the last ones teach all positions of the model."""

    mixture: dict[str, float] = Field(
        default={"chat": 0.62, "code": 0.14, "docs": 0.14, "book": 0.10}
    )
    """Share of the rows of each kind of text."""

    optimizer: Optimizer = "muon"
    learning_rate: PositiveFloat = 6e-3
    warmup_steps: PositiveInt = 100
    final_learning_rate_fraction: float = Field(default=0.05, ge=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0)
    """The decay of matrices; vectors are not decayed."""

    betas: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if not math.isclose(sum(stage.fraction for stage in self.stages), 1.0):
            raise ValueError("the fractions of the stages must add up to 1")
        return self

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return max(1, round(self.total_tokens / self.tokens_per_step))

    def length_tokens(self, step: int) -> int:
        """Return the row length of a step, counted from 0."""
        done = (step + 0.5) / self.num_steps
        for stage in self.stages:
            if done < stage.fraction:
                return stage.length_tokens
            done -= stage.fraction
        return self.stages[-1].length_tokens

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step: a linear warm-up, then a cosine to the final
        fraction."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        floor = self.final_learning_rate_fraction
        scale = floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * scale

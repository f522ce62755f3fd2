"""Which parameters are trained by which optimizer."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from tools.train_bundled_models.settings import TrainingSettings


def build_optimizers(
    model: LlamaForCausalLM, settings: TrainingSettings
) -> tuple[torch.optim.Optimizer, ...]:
    """Return AdamW for everything, or Muon (Jordan et al., 2024) for the matrices of the layers.

    Muon's steps are scaled to the size of AdamW's (Liu et al., 2025, arXiv 2502.16982, section
    2.2), so that one learning rate serves both. Embeddings and vectors always get AdamW, the
    vectors without weight decay.
    """
    embeddings = list(model.model.embed_tokens.parameters())
    layers = list(model.model.layers.parameters())
    matrices = [parameter for parameter in layers if parameter.ndim >= 2]
    vectors = [parameter for parameter in layers if parameter.ndim < 2]
    vectors += model.model.norm.parameters()
    if settings.optimizer == "adamw":
        return (_adamw([*embeddings, *matrices], vectors, settings),)
    muon = torch.optim.Muon(
        matrices,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return muon, _adamw(embeddings, vectors, settings)


def _adamw(
    decayed: list[torch.nn.Parameter],
    undecayed: list[torch.nn.Parameter],
    settings: TrainingSettings,
) -> torch.optim.Optimizer:
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)

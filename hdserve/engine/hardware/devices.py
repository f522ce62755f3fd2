"""The device a model runs on, and its dtype."""

from __future__ import annotations

from typing import cast

import torch

from hdserve.config import Device, Dtype
from hdserve.errors import ConfigError


def pick_device(device: Device) -> torch.device:
    """The device to run on; ``auto`` takes a GPU where there is one.

    Raises:
        ConfigError: ``cuda`` is asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch finds no CUDA device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def pick_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """The dtype to run in; ``auto`` takes bfloat16 where the hardware multiplies it."""
    if dtype == "auto":
        dtype = "bfloat16" if multiplies_bfloat16(device) else "float32"
    return cast("torch.dtype", getattr(torch, dtype))


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware has bfloat16 products; emulated ones are slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def has_amx_bf16(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the processor multiplies 16 rows of ``dtype`` at a time (AMX)."""
    is_known = device.type == "cpu" and dtype == torch.bfloat16
    return is_known and bool(torch.cpu.get_capabilities().get("amx_bf16"))

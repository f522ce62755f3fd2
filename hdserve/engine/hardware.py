"""What this machine offers a model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from hdserve.config import Device
from hdserve.engine.loader import pick_device, pick_dtype

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device as torch sees it.

    Attributes:
        name: of the GPU, or ``cpu``.
        dtype: what ``auto`` means here.
        free_bytes: memory free on the device.
        has_unused_gpu: the machine has an NVIDIA driver, and this torch cannot use it.
    """

    name: str
    dtype: str
    num_threads: int
    free_bytes: int
    torch_version: str
    has_unused_gpu: bool


def describe_hardware(wanted: Device = "auto") -> Hardware:
    """The device a model would run on.

    Raises:
        ConfigError: ``cuda`` is wanted and there is none.
    """
    device = pick_device(wanted)
    is_gpu = device.type == "cuda"
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if is_gpu:
        free_bytes = torch.cuda.mem_get_info(device)[0]
    return Hardware(
        name=torch.cuda.get_device_name(device) if is_gpu else "cpu",
        dtype=str(pick_dtype("auto", device)).removeprefix("torch."),
        num_threads=torch.get_num_threads(),
        free_bytes=free_bytes,
        torch_version=torch.__version__,
        has_unused_gpu=_NVIDIA_DRIVER.exists() and not torch.cuda.is_available(),
    )

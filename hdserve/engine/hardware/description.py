"""What this machine offers a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hdserve.config import Device
from hdserve.engine.hardware.devices import pick_device, pick_dtype
from hdserve.engine.hardware.memory import free_bytes

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device as torch sees it.

    Attributes:
        name: of the GPU, or ``cpu``.
        dtype: what ``auto`` means here.
        num_threads: the default of PyTorch.
        free_bytes: free memory of the device, of the part that may be used, or of the container.
        has_unused_gpu: the machine has an NVIDIA driver, but this torch cannot use it.
    """

    name: str
    dtype: str
    num_threads: int
    free_bytes: int
    torch_version: str
    has_unused_gpu: bool


def describe_hardware(wanted: Device, gpu_share: float = 1.0) -> Hardware:
    """The device a model would run on.

    Args:
        gpu_share: the part of a GPU that it may use.

    Raises:
        ConfigError: ``cuda`` is wanted and there is none.
    """
    device = pick_device(wanted)
    is_gpu = device.type == "cuda"
    return Hardware(
        name=torch.cuda.get_device_name(device) if is_gpu else "cpu",
        dtype=str(pick_dtype("auto", device)).removeprefix("torch."),
        num_threads=torch.get_num_threads(),
        free_bytes=int(free_bytes(device, gpu_share)),
        torch_version=torch.__version__,
        has_unused_gpu=_NVIDIA_DRIVER.exists() and not torch.cuda.is_available(),
    )

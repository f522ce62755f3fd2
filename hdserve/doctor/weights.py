"""The weights of a model on this machine: the files transformers reads, and their faults."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError, safe_open

from hdserve.config import ModelConfig
from hdserve.engine.hardware.devices import pick_device, pick_dtype
from hdserve.errors import ConfigError
from hdserve.models import resolve_model
from hdserve.models.hub import PICKLED, local_directory

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_FLOAT_BYTES: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2})
"""Bytes per number by dtype, for tensors that are converted to ``engine.dtype``."""

_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_MXFP4_ENDING = "_blocks"
"""Of the names of tensors whose bytes are two numbers of four bits each."""


def weight_files(model: ModelConfig) -> list[Path]:
    """Return the files read for a model that is on this machine, existing or not; the hub is not
    asked.

    Raises:
        ConfigError: the index of its shards cannot be read.
    """
    place = local_directory(model.model, model.revision)
    if place is None:
        return []
    if (place / WHOLE).exists():
        return [place / WHOLE]
    if (place / INDEX).exists():
        return _shards(place / INDEX)
    return [] if model.load_format == "safetensors" else sorted(place.glob(PICKLED))


def weight_faults(model: ModelConfig) -> Iterator[str]:
    """Yield what prevents the files of a local model from being loaded."""
    place = Path(resolve_model(model.model))
    if not (place / "config.json").is_file():
        yield f"{place} has no config.json"
    try:
        files = weight_files(model)
    except ConfigError as error:
        yield error.message
        return
    for path in files:
        if not path.is_file():
            yield f"{path} is missing, which {INDEX} names"
        elif path.suffix == ".safetensors":
            try:
                with safe_open(path, "numpy"):
                    pass
            except (OSError, SafetensorError) as error:
                yield f"{path} is damaged: {error}"


def weight_bytes(model: ModelConfig) -> int | None:
    """Return the bytes that the weights of a model take once loaded; for pickled ones, those of
    their files.  ``None`` if they are not all on this machine, or cannot be read.

    Raises:
        ConfigError: there is no such device.
    """
    device = pick_device(model.engine.device)
    itemsize, is_cpu = pick_dtype(model.engine.dtype, device).itemsize, device.type == "cpu"
    with suppress(ConfigError, OSError, SafetensorError):  # reported with the model
        files = weight_files(model)
        return sum(_loaded_bytes(path, itemsize, is_cpu) for path in files) if files else None
    return None


def _shards(index: Path) -> list[Path]:
    try:
        found = json.loads(index.read_bytes())
        names = {str(name) for name in found["weight_map"].values()}
        _ = found["metadata"]  # of which transformers cannot do without
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: cannot be read: {error!r}") from error
    return sorted(index.parent / name for name in names)


def _loaded_bytes(path: Path, itemsize: int, is_cpu: bool) -> int:
    """Return the bytes of the tensors in a file, with ``itemsize`` bytes for each floating-point
    number; of a pickled one its size."""
    num_bytes = path.stat().st_size
    if path.suffix != ".safetensors":
        return num_bytes
    with safe_open(path, "numpy") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            tensor = file.get_slice(name)
            more = _more_bytes(name, tensor.get_dtype(), itemsize, is_cpu)
            num_bytes += more * math.prod(tensor.get_shape())
    return num_bytes


def _more_bytes(name: str, dtype: str, itemsize: int, is_cpu: bool) -> int:
    """Return how many bytes more than in its file each element of a tensor takes once loaded.
    Quantised ones stay as they are, but for those that transformers dequantises on a CPU."""
    if dtype in _FLOAT_BYTES:
        return itemsize - _FLOAT_BYTES[dtype]
    if is_cpu and dtype in _FP8:
        return itemsize - 1
    if is_cpu and dtype == "U8" and name.endswith(_MXFP4_ENDING):
        return 2 * itemsize - 1
    return 0

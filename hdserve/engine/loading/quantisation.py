"""Checkpoints whose weights are stored in fewer bits, which transformers loads."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers.quantizers.auto import AutoHfQuantizer

from hdserve.errors import ConfigError

OTHER_CHECKPOINT = "another checkpoint of the model, such as one in bfloat16"
"""What is loaded instead of weights whose quantisation transformers does not know."""

_QUANTIZERS: Any = AutoHfQuantizer
"""Not typed."""


def is_quantised(config: Any) -> bool:
    """Whether a configuration of transformers says that weights are stored in fewer bits.

    Raises:
        ValueError: it does not say in which way, or transformers does not know it, and would load
            the weights as they are, without what they are scaled by.
    """
    return _stored(config) is not None


def check_quantisation(config: Any) -> None:
    """
    Raises:
        ConfigError: transformers cannot load such weights here, such as for want of a package.
        ValueError: it can nowhere, see :func:`is_quantised`.
    """
    stored = deepcopy(_stored(config))
    if stored is None:
        return
    try:
        quantizer = _QUANTIZERS.from_config(stored, pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
    except (ImportError, RuntimeError, ValueError) as error:
        raise ConfigError(f"the weights are quantised: {error}") from error


def convert_dequantised(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give the weights that transformers has dequantised, to bfloat16, the dtype of the others;
    those that it keeps in float32, and buffers such as rotary frequencies, stay as they are."""
    for parameter in module.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.to(dtype)


def _stored(config: Any) -> Any:
    parts = (config, config.get_text_config(decoder=True))
    found = next(filter(None, (getattr(part, "quantization_config", None) for part in parts)), None)
    if isinstance(found, dict) and not _QUANTIZERS.supports_quant_method(found):
        raise ValueError(
            f"transformers cannot load weights quantised as {found.get('quant_method')!r}; use "
            f"{OTHER_CHECKPOINT}"
        )
    return found

"""Whether the Hugging Face hub can be asked for a model, and what of it is on this machine."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import file_exists, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from hdserve.errors import ConfigError
from hdserve.models import bundled_models, resolve_model

PICKLED = "pytorch_model*.bin"
"""The names of weights whose format can run code."""

_ANSWERS = (401, 403, 404)
"""The hub has no such model, or not for everybody: transformers asks once and reports it."""


def check_hub(model: str, revision: str | None) -> None:
    """Ask the hub once for a model without an owner, most likely a misspelt bundled model.  Without
    network access, transformers would keep trying for over a minute.

    Raises:
        ConfigError: the hub does not answer, and there is no copy on this machine.
    """
    fault = None if "/" in model else hub_fault(model, revision)
    if fault is not None:
        raise ConfigError(
            f"cannot load the model {model!r}: there is no such directory, the bundled models are "
            f"{', '.join(bundled_models())}, and the hub cannot be asked: {fault}"
        )


def local_directory(model: str, revision: str | None) -> Path | None:
    """The directory with a model's files on this machine: its own, or the one to which those of the
    hub were downloaded, perhaps not all; ``None`` if there is none.  The hub is not asked."""
    place = Path(resolve_model(model))
    if place.is_dir():
        return place
    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # not a name the hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None


def hub_fault(model: str, revision: str | None) -> str | None:
    """Ask the hub once for a model of which there is no copy on this machine; why it does not
    answer, or ``None``."""
    if Path(resolve_model(model)).is_dir():
        return None
    try:
        if try_to_load_from_cache(model, "config.json", revision=revision) is not None:
            return None
        file_exists(model, "config.json", revision=revision)
    except ValueError:
        return None  # not a name the hub could have; transformers says so as well
    except Exception as error:  # connection errors, of another library's classes
        is_answer = isinstance(error, HfHubHTTPError) and error.response.status_code in _ANSWERS
        return None if is_answer else str(error)
    return None

"""Whether a model can be asked for at the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import file_exists, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from hdserve.errors import ConfigError
from hdserve.models import bundled_models, resolve_model

_ANSWERS = (401, 403, 404)
"""The hub has no such model, or not for everybody: transformers asks once, and says so."""


def check_hub(model: str, revision: str | None) -> None:
    """Ask the hub once for a model without an owner, most likely a bundled one with its name
    misspelt.  Where there is no way to the hub, transformers asks for over a minute.

    Raises:
        ConfigError: the hub does not answer, and there is no copy on this machine.
    """
    fault = None if "/" in model else hub_fault(model, revision)
    if fault is not None:
        raise ConfigError(
            f"cannot load the model {model!r}: there is no such directory, the bundled models are "
            f"{', '.join(bundled_models())}, and the hub cannot be asked: {fault}"
        )


def hub_fault(model: str, revision: str | None) -> str | None:
    """Ask the hub once for a model of which there is no copy on this machine, and return why it
    does not answer, if so."""
    if Path(resolve_model(model)).is_dir():
        return None
    try:
        if try_to_load_from_cache(model, "config.json", revision=revision) is not None:
            return None
        file_exists(model, "config.json", revision=revision)
    except ValueError:
        return None  # no name the hub could have, as transformers says, too
    except Exception as error:  # of connections; their class is another library's
        is_answer = isinstance(error, HfHubHTTPError) and error.response.status_code in _ANSWERS
        return None if is_answer else str(error)
    return None

"""Problems of a configuration that only the parts it is meant for can detect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import typer

from hdserve.cli.model_option import tokenizer_of
from hdserve.config import ModelConfig, ServeConfig
from hdserve.config.mistakes import LineOf, Location, nowhere, place_of
from hdserve.config.relative_paths import WHERE_THEY_BEGIN, relative_paths
from hdserve.databases.statistics_info import read_info
from hdserve.errors import ConfigError, SnapshotError
from hdserve.importing import import_fault
from hdserve.models import bundled_models, context_length, is_path

_LESS = "without it there is less to draft"
_NO_GPU = (
    "a replica sees no GPU with num_gpus: 0, unless a Serve config file reserves one in its "
    "ray_actor_options; num_gpus: 1, or a part of one, is expected"
)


def find_problems(config: ServeConfig, line_of: LineOf) -> list[str]:
    """Return the problems of a configuration whose individual keys are valid: one line for each,
    which begins with its place.

    Args:
        line_of: finds the lines of the file that ``config`` is from.
    """
    return [f"{place_of(where, line_of)}: {reason}" for where, reason in _problems(config)]


def _problems(config: ServeConfig) -> Iterator[tuple[Location, str]]:
    from hdserve.access import read_access
    from hdserve.drafting.registry import check_drafters

    try:
        read_access(config.access)
    except ConfigError as error:
        yield ("access",), error.message
    for index, model in enumerate(config.models):
        try:
            check_drafters(model.drafting)
        except ConfigError as error:
            for line in error.message.splitlines():
                yield ("models", index, "drafting", "drafters"), line
        for where, reason in _model_problems(model):
            yield ("models", index, *where), reason


def _model_problems(model: ModelConfig) -> Iterator[tuple[Location, str]]:
    if is_path(model.model) and not os.path.isdir(model.model):
        yield ("model",), f"there is no directory {Path(model.model).absolute()}"
    wanted, longest = model.engine.max_model_len, context_length(model.model)
    if wanted is not None and longest is not None and wanted > longest:
        reason = f"the model was made for {longest} tokens, not for {wanted}"
        yield ("engine", "max_model_len"), reason
    if model.chat_template is not None and (reason := _template_fault(model.chat_template)):
        yield ("chat_template",), reason
    policy = model.autoscaling and model.autoscaling.policy
    if policy and (reason := import_fault(policy.policy_function)):
        yield ("autoscaling", "policy", "policy_function"), reason


def _template_fault(path: Path) -> str:
    """Return why the template cannot be used; empty if it can."""
    from hdserve.engine.tokenization.tokenizer import read_chat_template

    try:
        read_chat_template(path)
    except ConfigError as error:
        return error.message
    return ""


def find_warnings(config: ServeConfig, line_of: LineOf) -> Iterator[str]:
    """Yield what is probably a mistake, each in one line.

    Args:
        line_of: finds the lines of the file that ``config`` is from.
    """
    from hdserve.access import key_file_warnings

    for item in key_file_warnings(config.access):
        yield item.text
    if reason := _narrow_gateways(config):
        yield f"{place_of(('gateway', 'max_ongoing_requests'), line_of)}: {reason}"
    for index, model in enumerate(config.models):
        if reason := _statistics_fault(model):
            yield f"{place_of(('models', index, 'statistics'), line_of)}: {reason}"
        for reason in _vain_drafts(config, model):
            yield f"{place_of(('models', index, 'draft_from'), line_of)}: {reason}"
        if model.engine.device == "cuda" and not model.num_gpus:
            yield f"{place_of(('models', index, 'engine', 'device'), line_of)}: {_NO_GPU}"


def warn_of_relative_paths(config: ServeConfig, line_of: LineOf = nowhere) -> None:
    """List on standard error each path that an already running Ray cluster would open elsewhere,
    unless it was started in this directory.

    Args:
        line_of: finds the lines of the file that ``config`` is from.
    """
    for where, path in relative_paths(config):
        typer.echo(f"warning: {place_of(where, line_of)}: {path} {WHERE_THEY_BEGIN}", err=True)


def _narrow_gateways(config: ServeConfig) -> str:
    """Return why gateways are full before the replicas are; empty if they are not."""
    num_taken, num_open = config.gateway.max_num_ongoing, config.max_num_open
    if num_taken > num_open:
        return ""
    each = num_open // config.gateway.num_replicas + 1
    return (
        f"all gateways together take {num_taken} requests at a time, and the replicas decode and "
        f"queue {num_open}: others, /health and /metrics among them, would wait in front of the "
        f"gateways, and no replica would refuse any; {each} each, and some more, are expected"
    )


def _statistics_fault(model: ModelConfig) -> str:
    """Return why a model would be served without its statistics database; empty if no problem is
    known.  The tokenizer of a model that is not on this machine is not downloaded."""
    if model.statistics in (None, "bundled"):
        return ""
    directory = Path(model.statistics)
    if not os.path.isdir(directory):
        return f"there is no directory {directory.absolute()} here; {_LESS}"
    try:
        info = read_info(directory)
    except SnapshotError as error:
        return f"{error.message}; {_LESS}"
    fingerprint = _fingerprint_here(model)
    if fingerprint in ("", info.tokenizer):
        return ""
    return f"{directory.absolute()} was made with another tokenizer; {_LESS}"


def _fingerprint_here(model: ModelConfig) -> str:
    """Return the fingerprint of the model's tokenizer; empty if that is not here, or cannot be
    loaded."""
    if model.model in bundled_models() or os.path.isdir(model.model):
        with suppress(ConfigError):
            return tokenizer_of(model).fingerprint
    return ""


def _vain_drafts(config: ServeConfig, model: ModelConfig) -> Iterator[str]:
    """Yield why other models never have anything for ``model`` to draft from."""
    if model.draft_from and not config.model_database.is_enabled:
        yield "model_database is off, so nothing of other models can be drafted from"
        return
    for other in config.models:
        if other.name in model.draft_from and not other.share_output:
            yield f"{other.name} has share_output: false, so there is nothing to draft from"

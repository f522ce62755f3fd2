"""What is wrong, or probably so, with a configuration whose keys are valid one by one.

``hdserve check-config`` and ``hdserve serve`` name the place in the file, ``hdserve doctor`` what
fixes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hdserve.config import AccessConfig, ModelConfig, ServeConfig
from hdserve.config.mistakes import LineOf, Location, place_of
from hdserve.config.model import MOST_REQUESTS
from hdserve.databases.statistics_info import read_info
from hdserve.errors import ConfigError, InvalidRequest, SnapshotError
from hdserve.models import bundled_models, context_length, is_path

_IMPORT_TIMEOUT_S = 60.0
_MAX_REASON_CHARACTERS = 300
_LESS = "without it there is less to draft"
_NO_GPU = "a replica sees no GPU with num_gpus: 0; num_gpus: 1, or a part of one, is expected"


class Problem(NamedTuple):
    """A setting that does not go with the others, or with what it names.

    Attributes:
        where: its place in the configuration.
        remedy: as that of a :class:`~hdserve.doctor.finding.Finding`.
    """

    where: Location
    text: str
    remedy: str


class Faults(NamedTuple):
    """What keeps a server from starting: one line for each, which begins with its place.

    Attributes:
        not_here: what is not on this machine, and may be on another.
    """

    wrong: list[str]
    not_here: list[str]


def find_faults(config: ServeConfig, line_of: LineOf) -> Faults:
    """Return what keeps a server from starting.

    Args:
        line_of: finds the lines of the file that ``config`` is from.
    """
    found = Faults([], [])
    for where, text, is_missing in _faults(config):
        lines = found.not_here if is_missing else found.wrong
        lines.append(f"{place_of(where, line_of)}: {text}")
    return found


def find_warnings(config: ServeConfig, line_of: LineOf) -> Iterator[str]:
    """Yield what is probably a mistake, each in one line.

    Args:
        line_of: as for :func:`find_faults`.
    """
    from hdserve.access import key_file_warnings

    for item in key_file_warnings(config.access):
        yield item.text
    for problem in setting_warnings(config):
        yield f"{place_of(problem.where, line_of)}: {problem.text}"
    for index, model in enumerate(config.models):
        if reason := _statistics_fault_here(model):
            yield f"{place_of(('models', index, 'statistics'), line_of)}: {reason}"


def setting_problems(config: ServeConfig) -> Iterator[Problem]:
    """Yield the settings that keep a server from starting."""
    for index, model in enumerate(config.models):
        for problem in _model_problems(model):
            yield problem._replace(where=("models", index, *problem.where))


def setting_warnings(config: ServeConfig) -> Iterator[Problem]:
    """Yield the settings that are probably a mistake."""
    yield from _narrow_gateways(config)
    for index, model in enumerate(config.models):
        place = ("models", index)
        for reason, remedy in _vain_drafts(config, model):
            yield Problem((*place, "draft_from"), reason, remedy)
        if model.engine.device == "cuda" and model.num_gpus == 0:
            yield Problem((*place, "engine", "device"), _NO_GPU, "num_gpus: 1")


def statistics_fault(path: str, fingerprint: str) -> str:
    """Return why a model would be served without its statistics database; empty if no problem is
    known.

    Args:
        fingerprint: of the model's tokenizer; empty if it is not known.
    """
    directory = Path(path).absolute()
    try:
        info = read_info(directory)
    except SnapshotError as error:
        return f"{error.message}; {_LESS}"
    if fingerprint in ("", info.tokenizer):
        return ""
    return f"{directory} was made with another tokenizer; {_LESS}"


def _faults(config: ServeConfig) -> Iterator[tuple[Location, str, bool]]:
    """Yield what keeps a server from starting, and whether it is something that is missing here."""
    for text, is_missing in _access_faults(config.access):
        yield ("access",), text, is_missing
    for index, model in enumerate(config.models):
        if is_path(model.model) and not os.path.isdir(model.model):
            reason = f"there is no directory {Path(model.model).absolute()}"
            yield ("models", index, "model"), reason, not os.path.exists(model.model)
    for problem in setting_problems(config):
        yield problem.where, problem.text, _may_be_elsewhere(config, problem.where)


def _access_faults(access: AccessConfig) -> Iterator[tuple[str, bool]]:
    from hdserve.access import read_access

    read = [(access, False)]
    if access.api_keys_file is not None and not os.path.exists(access.api_keys_file):
        read = [(access.model_copy(update={"api_keys_file": None}), False), (access, True)]
    for config, is_missing in read:
        try:
            read_access(config)
        except ConfigError as error:
            yield error.message, is_missing
            return


def _may_be_elsewhere(config: ServeConfig, where: Location) -> bool:
    """Whether a setting names a file that is not here, or a module, which may be another here."""
    match where:
        case ("models", int(index), "chat_template"):
            template = config.models[index].chat_template
            return template is not None and not os.path.exists(template)
        case (*_, "policy_function"):
            return True
    return False


def _model_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of one model; their places are relative to it."""
    remedy = "drafting: {drafters: [{name: hierarchy}]}"
    for reason in _drafter_faults(model):
        yield Problem(("drafting", "drafters"), reason, remedy)
    wanted, longest = model.engine.max_model_len, context_length(model.model)
    if wanted is not None and longest is not None and wanted > longest:
        reason = f"the model takes {longest} tokens at most, not {wanted}"
        remedy = f"engine: {{max_model_len: {longest}}}"
        yield Problem(("engine", "max_model_len"), reason, remedy)
    if model.chat_template is not None and (reason := _template_fault(model.chat_template)):
        remedy = "chat_template: null  # or a file with a template"
        yield Problem(("chat_template",), reason, remedy)
    if reason := _variables_fault(model.defaults.chat_template_kwargs):
        remedy = "defaults: {chat_template_kwargs: {}}  # or variables of the template"
        yield Problem(("defaults", "chat_template_kwargs"), reason, remedy)
    policy = model.autoscaling and model.autoscaling.policy
    if policy and (reason := _import_fault(policy.policy_function)):
        remedy = "autoscaling: {policy: null}  # or the import path of a function, MODULE:NAME"
        yield Problem(("autoscaling", "policy", "policy_function"), reason, remedy)


def _drafter_faults(model: ModelConfig) -> list[str]:
    from hdserve.drafting.registry import check_drafters

    try:
        check_drafters(model.drafting)
    except ConfigError as error:
        return error.message.splitlines()
    return []


def _template_fault(path: Path) -> str:
    """Return why the template cannot be used; empty if it can."""
    from hdserve.engine.tokenization.tokenizer import read_chat_template

    try:
        read_chat_template(path)
    except ConfigError as error:
        return error.message
    return ""


def _variables_fault(names: Collection[str]) -> str:
    """Return why these are not variables of a template; empty if they may be."""
    if not names:
        return ""  # importing takes seconds
    from hdserve.engine.tokenization.tokenizer import check_variables

    try:
        check_variables(names)
    except InvalidRequest as error:
        return error.message
    return ""


def _import_fault(name: str) -> str:
    """Return why ``name``, as in ``module:function``, cannot be imported; empty if it can.

    The current directory is searched too, as by ``serve run``.  The import happens in a separate
    process, so side effects of the module stay there.
    """
    resolve = "import pkgutil, sys; pkgutil.resolve_name(sys.argv[1])"
    command = [sys.executable, "-c", resolve, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{name} is not imported in {_IMPORT_TIMEOUT_S:g} s"
    if not done.returncode:
        return ""
    lines = done.stderr.splitlines() or [f"status {done.returncode}"]
    return f"{name} cannot be imported: {lines[-1][:_MAX_REASON_CHARACTERS]}"


def _narrow_gateways(config: ServeConfig) -> Iterator[Problem]:
    """Yield a problem if gateways are full before the replicas are."""
    num_taken, num_open = config.gateway.max_num_ongoing, config.max_num_open
    if num_taken > num_open:
        return
    each = num_open // config.gateway.num_replicas + 1
    expected = f"{each} each, and some more, are"
    remedy = f"gateway: {{max_ongoing_requests: {each}}}  # and some more"
    if each > MOST_REQUESTS:
        expected = "a smaller engine.max_num_queued is"
        remedy = "engine: {max_num_queued: 256}  # or more gateway.num_replicas"
    reason = (
        f"all gateways together take {num_taken} requests at a time, and the replicas decode and "
        f"queue {num_open}: others, /health and /metrics among them, would wait in front of the "
        f"gateways, and no replica would refuse any; {expected} expected"
    )
    yield Problem(("gateway", "max_ongoing_requests"), reason, remedy)


def _statistics_fault_here(model: ModelConfig) -> str:
    """Return what :func:`statistics_fault` does.  The tokenizer of a model that is not on this
    machine is not downloaded."""
    if model.statistics in (None, "bundled"):
        return ""
    if not os.path.isdir(model.statistics):
        return f"there is no directory {Path(model.statistics).absolute()} here; {_LESS}"
    return statistics_fault(model.statistics, _fingerprint_here(model))


def _fingerprint_here(model: ModelConfig) -> str:
    """Return the fingerprint of the model's tokenizer; empty if that is not here, or cannot be
    loaded."""
    from hdserve.engine.tokenization.tokenizer import load_tokenizer

    if model.model in bundled_models() or os.path.isdir(model.model):
        with suppress(ConfigError):
            return load_tokenizer(
                model.model, model.revision, trust_remote_code=model.trust_remote_code
            ).fingerprint
    return ""


def _vain_drafts(config: ServeConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield why other models never have anything for ``model`` to draft from, and what fixes
    it."""
    if model.draft_from and not config.model_database.is_enabled:
        remedy = "draft_from: []  # or model_database: {is_enabled: true}"
        yield "model_database is off, so nothing of other models can be drafted from", remedy
        return
    silent = [each.name for each in config.models if not each.share_output]
    others = ", ".join(name for name in model.draft_from if name not in silent)
    for name in silent:
        if name in model.draft_from:
            remedy = f"draft_from: [{others}]  # or share_output: true of {name}"
            yield f"{name} has share_output: false, so there is nothing to draft from", remedy

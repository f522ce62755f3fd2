"""What a configuration needs of a machine or cluster: resources, keys, directories, packages."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hdserve.access import key_file_warnings, read_access
from hdserve.config import AccessConfig, ServeConfig
from hdserve.config.relative_paths import WHERE_THEY_BEGIN, relative_paths
from hdserve.databases.output_files import databases_root, left_by_other_versions
from hdserve.doctor.capacity import compare_resources, compare_with_cluster
from hdserve.doctor.cluster import Cluster, is_own
from hdserve.doctor.finding import Finding, Verdict, failure, ok, warning
from hdserve.doctor.gpus import shortage
from hdserve.doctor.machine import check_cluster
from hdserve.doctor.permissions import reading_remedy
from hdserve.doctor.problems import setting_problems, setting_warnings
from hdserve.doctor.weights import weight_bytes
from hdserve.engine.hardware.description import describe_hardware
from hdserve.errors import ConfigError
from hdserve.telemetry import check_tracing


def check_placement(
    config: ServeConfig, cluster: Cluster | None, address: str
) -> Iterator[Finding]:
    """Check that what the configuration reserves is available: on this machine, or free in the
    cluster.

    Args:
        cluster: the one at ``address``; ``None`` if it does not say what it has.
    """
    if cluster is None:
        answers = all(finding.verdict is Verdict.OK for finding in check_cluster(address))
        if answers and not is_own(address):  # without Ray, which is reported
            text = "the cluster does not say what it has free"
            yield warning("resources", text, f"ray status --address {address}")
    elif is_own(address):
        yield from compare_resources(config, cluster.free, "this machine")
    else:
        yield from compare_with_cluster(config, cluster)


def check_gpus(config: ServeConfig, cluster: Cluster | None) -> Iterator[Finding]:
    """Report models that run on the CPU although there are GPUs; nothing if there are none."""
    if cluster and (lack := shortage(config, cluster.nodes)):
        yield warning("GPUs", lack.text, lack.remedy)


def check_paths(config: ServeConfig, address: str) -> Iterator[Finding]:
    """Report paths that an already running cluster would open elsewhere, unless it was started in
    this directory, where the other checks look."""
    if is_own(address):
        return
    for (*parents, key), path in relative_paths(config):
        remedy = f"{key}: {_yaml_text(os.path.abspath(path))}"
        subject = "paths"
        match parents:
            case ["models", int(index)]:
                subject = f"{config.models[index].name}: paths"
            case [section]:
                subject, remedy = f"{section}: paths", f"{section}: {{{remedy}}}"
        yield warning(subject, f"{key}: {path} {WHERE_THEY_BEGIN}", remedy)


def _yaml_text(text: str) -> str:
    """Return a text as it can be written anywhere in a configuration."""
    return text if re.fullmatch(r"[\w./-]+", text) else json.dumps(text)


def check_memory(config: ServeConfig) -> Iterator[Finding]:
    """Check that the weights of all processes on the CPU fit together, if those of each model
    do."""
    num_bytes, free_bytes = 0, math.inf
    for model in config.models:
        with suppress(ConfigError):
            found = describe_hardware(model.engine.device)
            if found.name == "cpu":
                num_bytes += model.first_num_replicas * (weight_bytes(model) or 0)
                free_bytes = found.free_bytes
    if num_bytes > free_bytes:
        text = f"{num_bytes / 2**30:.1f} GiB of weights in all, {free_bytes / 2**30:.1f} GiB free"
        remedy = "engine: {dtype: bfloat16}  # of the largest; or fewer models or num_replicas"
        yield failure("memory", text, remedy)


def check_settings(config: ServeConfig) -> Iterator[Finding]:
    """Report settings that keep a server from starting, or that are probably a mistake; nothing if
    there are none."""
    for make, problems in (
        (failure, setting_problems(config)),
        (warning, setting_warnings(config)),
    ):
        for problem in problems:
            subject = ".".join(map(str, problem.where))
            match problem.where:
                case ("models", int(index), *keys):
                    subject = f"{config.models[index].name}: {'.'.join(map(str, keys))}"
            yield make(subject, problem.text, problem.remedy)


def check_telemetry(config: ServeConfig) -> Iterator[Finding]:
    """Check that traces can be sent, if they are wanted."""
    if config.telemetry.endpoint is None:
        return
    try:
        check_tracing(config.telemetry)
    except ConfigError as error:
        yield failure("traces", error.message, "python -m pip install 'hdserve[tracing]'")
    else:
        yield ok("traces", f"to {config.telemetry.endpoint}")


def check_access(config: ServeConfig) -> Iterator[Finding]:
    """Check that the keys can be read, and by whom."""
    subject = "access"
    try:
        access = read_access(config.access)
    except ConfigError as error:
        yield failure(subject, error.message, _access_remedy(config.access, error.message))
        return
    warnings = [*key_file_warnings(config.access)]
    for found in warnings:
        yield warning(subject, found.text, found.remedy)
    if not warnings:
        yield ok(subject, f"{len(access.keys)} API keys" if access.keys else "for everybody")


def _access_remedy(config: AccessConfig, message: str) -> str:
    """Return the remedy if the keys cannot be read."""
    keys, admin = config.api_keys_file, config.admin_key_file
    for path in (keys, admin):
        if path is None or str(path) not in message:
            continue
        place = shlex.quote(str(path))
        if not os.path.exists(path):
            return (
                reading_remedy(path)
                or f'(umask 077; echo "$(openssl rand -hex 24) default" > {place})'
            )
        return f"nano {place}" if os.access(path, os.R_OK) else f'sudo chown "$USER" {place}'
    if admin is None:
        return "export HDSERVE_ADMIN_KEY=$(openssl rand -hex 24)"
    return f"(umask 077; openssl rand -hex 24 > {shlex.quote(str(admin))})"


def check_model_database(config: ServeConfig) -> Iterator[Finding]:
    """Check that generated text survives a restart."""
    database, subject = config.model_database, "model database"
    if not database.is_enabled:
        yield warning(
            subject, "is off: replicas share nothing", "model_database: {is_enabled: true}"
        )
        return
    directory = database.snapshot_dir
    if directory is None:
        remedy = "model_database: {snapshot_dir: /var/lib/hdserve}"
        yield warning(subject, "is kept in memory only, and lost with its actor", remedy)
        return
    places = (directory, *directory.absolute().parents)
    place = next(path for path in places if os.path.exists(path))
    if not place.is_dir():
        remedy = "model_database: {snapshot_dir: /var/lib/hdserve}"
        yield failure(subject, f"{directory} cannot be written", remedy)
    elif (closed := _closed_directory(place, directory)) is not None:
        yield failure(subject, f"{closed} cannot be written", _opening_remedy(closed, directory))
    else:
        yield ok(subject, f"{directory}, {shutil.disk_usage(place).free / 2**30:.1f} GiB free")
    for other, what_to_do in left_by_other_versions(directory).items():
        remedy = f"hdserve database export {shlex.quote(str(directory))} old.hdb  # {what_to_do}"
        yield warning(subject, f"{other} is not read", remedy)


def _closed_directory(place: Path, directory: Path) -> Path | None:
    """Return the directory in which nothing can be written: ``place``, or one of the databases'
    directories in ``directory``; perhaps not the only one."""
    if not os.access(place, os.W_OK | os.X_OK) or not _takes_files(place):
        return place
    root = databases_root(directory)
    needed = filter(os.path.isdir, (root, *root.glob("*"), *root.glob("*/*")))
    return next((path for path in needed if not os.access(path, os.W_OK | os.X_OK)), None)


def _takes_files(directory: Path) -> bool:
    """Return whether a file can be created in ``directory``; for root, permissions do not tell."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _opening_remedy(closed: Path, directory: Path) -> str:
    """Return the command that makes ``directory`` writable, given that ``closed`` is not."""
    if os.statvfs(closed).f_flag & os.ST_RDONLY:
        parents = (closed.absolute(), *closed.absolute().parents)
        mount = shlex.quote(str(next(filter(Path.is_mount, parents))))
        return f"sudo mount -o remount,rw {mount}  # or another snapshot_dir"
    if not os.path.exists(directory):
        return (
            reading_remedy(directory) or f'sudo install -d -o "$USER" {shlex.quote(str(directory))}'
        )
    root = databases_root(directory)
    command = "chown -R" if closed == root or root in closed.parents else "chown"
    place = root if command == "chown -R" else closed
    return f'sudo {command} "$USER" {shlex.quote(str(place))}'

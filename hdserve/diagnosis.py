"""What ``hdserve doctor`` looks at: each check finds things, and says how to mend what is wrong.

The checks run the code that serving runs where they can, so that they fail for its reasons.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

from hdserve.access import key_file_warnings, read_access
from hdserve.config import AccessConfig, ModelConfig, ServeConfig
from hdserve.databases.output_files import left_by_other_versions
from hdserve.databases.statistics import read_info
from hdserve.engine.compiled_forward import can_compile as compiler_exists
from hdserve.engine.hardware import describe_hardware, node_resources
from hdserve.engine.tokenizer import load_tokenizer, read_chat_template
from hdserve.errors import ConfigError, SnapshotError
from hdserve.finding import Finding, Verdict, failure, ok, warning
from hdserve.models import bundled_models, bundled_statistics, is_path, resolve_model
from hdserve.placement_check import compare_resources, compare_with_cluster
from hdserve.shadows import shadows
from hdserve.telemetry import check_tracing

MIN_SHARED_MEMORY_BYTES = 2**30

_MIN_PYTHON = (3, 11)
_IMPORT_TIMEOUT_S = 120.0
_HTTP_TIMEOUT_S = 2.0
_MIN_PORT, _MAX_PORT = 1024, 65535
_CONNECT_TIMEOUT_S = 3.0
_OWN_CLUSTER = ("", "local")
"""Addresses that mean a cluster which is started with the application, on this machine."""


def diagnose(config: ServeConfig, port: int, ray_address: str = "") -> Iterator[Finding]:
    """Everything that ``serve run deployments:app`` needs, in the order in which it needs it.

    Args:
        ray_address: of the cluster to run on; empty for one of its own.
    """
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        check_python,
        check_packages,
        check_ray,
        lambda: check_cluster(ray_address),
        lambda: check_placement(config, ray_address),
        lambda: check_port(port),
        lambda: check_access(config),
        lambda: check_model_database(config),
        lambda: check_telemetry(config),
    )
    for check in checks:
        yield from check()
    for model in config.models:
        yield from check_device(model)
        yield from check_compiler(model)
        yield from check_model(model)


def check_python() -> Iterator[Finding]:
    found = sys.version.split()[0]
    if sys.version_info < _MIN_PYTHON:
        yield failure("Python", f"{found} is too old", "make setup PYTHON=python3.11")
    else:
        yield ok("Python", found)


def check_packages(distribution: str = "hdserve") -> Iterator[Finding]:
    """Whether each dependency is installed, in a version the project takes."""
    remedy = "python -m pip install --constraint constraints.txt --editable ."
    try:
        lines = requires(distribution) or []
    except PackageNotFoundError:
        yield failure("packages", f"{distribution} itself is not installed", remedy)
        return
    num_right = 0
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield failure("packages", f"{requirement} is not installed", remedy)
            continue
        if requirement.specifier.contains(found, prereleases=True):
            num_right += 1
        else:
            yield failure("packages", f"{requirement} is needed; {found} is installed", remedy)
    for shadow in shadows(Path.cwd()):
        text = f"{shadow} hides the installed package from Ray's processes"
        place = shlex.quote(str(shadow.parent.parent))
        yield failure("packages", text, f"cd {place}  # or to any other directory")
    yield ok("packages", f"{num_right} dependencies fit")


def check_ray(
    shared_memory: Path = Path("/dev/shm"), min_free_bytes: int = MIN_SHARED_MEMORY_BYTES
) -> Iterator[Finding]:
    """Whether Ray Serve can be imported, in a process of its own, and has room for objects."""
    command = [sys.executable, "-c", "import ray, ray.serve; print(ray.__version__)"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        yield failure("Ray", f"its import took over {_IMPORT_TIMEOUT_S:.0f} s", "ray stop --force")
        return
    if result.returncode:
        last_line = (result.stderr.strip().splitlines() or ["no message"])[-1]
        remedy = 'python -m pip install --constraint constraints.txt "ray[serve]"'
        yield failure("Ray", f"Ray Serve cannot be imported: {last_line}", remedy)
        return
    yield ok("Ray", result.stdout.strip())
    if shared_memory.is_dir():
        free_bytes = shutil.disk_usage(shared_memory).free
        text = f"{free_bytes / 2**30:.1f} GiB free in {shared_memory}"
        if free_bytes < min_free_bytes:
            remedy = (
                f"sudo mount -o remount,size=4G {shared_memory}"
                "  # in a container: docker run --shm-size=4g, or more memory for the pod"
            )
            yield warning("shared memory", f"{text}; Ray falls back to a slow disk", remedy)
        else:
            yield ok("shared memory", text)


def check_cluster(address: str) -> Iterator[Finding]:
    """Whether somebody listens where the cluster is said to be."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):  # "local", "auto" and the like: Ray's own to find
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        remedy = "unset RAY_ADDRESS  # for a cluster of its own; or there: ray start --head"
        yield failure("Ray cluster", f"nobody answers at {address}: {error}", remedy)
    else:
        yield ok("Ray cluster", f"somebody listens at {address}")


def check_placement(config: ServeConfig, address: str) -> Iterator[Finding]:
    """Whether what the configuration reserves is there: on this machine, or free in the cluster."""
    if address in _OWN_CLUSTER:
        yield from compare_resources(config, [node_resources()], "this machine")
        yield from check_memory(config)
    elif all(finding.verdict is Verdict.OK for finding in check_cluster(address)):
        yield from compare_with_cluster(config, address)


def check_memory(config: ServeConfig) -> Iterator[Finding]:
    """Whether the weights of all processes find room together, where each model's do."""
    num_bytes, free_bytes = 0, math.inf
    for model in config.models:
        with suppress(ConfigError):
            found = describe_hardware(model.engine.device)
            if found.name == "cpu":
                num_bytes += model.first_num_replicas * _weight_bytes(model)
                free_bytes = found.free_bytes
    if num_bytes > free_bytes:
        text = f"{num_bytes / 2**30:.1f} GiB of weights in all, {free_bytes / 2**30:.1f} GiB free"
        remedy = "engine: {dtype: bfloat16}  # of the largest; or fewer models or num_replicas"
        yield failure("memory", text, remedy)


def check_telemetry(config: ServeConfig) -> Iterator[Finding]:
    """Whether traces that are wanted can be sent."""
    if config.telemetry.endpoint is None:
        return
    try:
        check_tracing(config.telemetry)
    except ConfigError as error:
        yield failure("traces", error.message, "python -m pip install 'hdserve[tracing]'")
    else:
        yield ok("traces", f"to {config.telemetry.endpoint}")


def check_port(port: int) -> Iterator[Finding]:
    """Whether ``serve run`` can listen, or hdserve does already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            yield _taken_port(port)
            return
    yield ok("port", f"{port} is free")


def _taken_port(port: int) -> Finding:
    try:
        url = f"http://127.0.0.1:{port}/version"
        with urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S) as answer:
            if b'"version"' in answer.read(1000):
                return ok("port", f"hdserve answers on {port}")
    except (OSError, ValueError, urllib.error.URLError):
        pass
    text = f"another program listens on {port}; 'ss -ltnp' shows which"
    return failure("port", text, f"hdserve serve --port {_free_port(port)}")


def _free_port(taken: int) -> int:
    """The next one that nobody listens at."""
    for port in chain(range(taken + 1, _MAX_PORT + 1), range(_MIN_PORT, taken)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    return taken


def check_access(config: ServeConfig) -> Iterator[Finding]:
    """Whether the keys can be read, and by whom."""
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
    """For what keeps the keys from being read."""
    keys, admin = config.api_keys_file, config.admin_key_file
    for path in (keys, admin):
        if path is None or str(path) not in message:
            continue
        place = shlex.quote(str(path))
        if not path.exists():
            return f'(umask 077; echo "$(openssl rand -hex 24) default" > {place})'
        return f"nano {place}" if os.access(path, os.R_OK) else f'sudo chown "$USER" {place}'
    if admin is None:
        return "export HDSERVE_ADMIN_KEY=$(openssl rand -hex 24)"
    return f"(umask 077; openssl rand -hex 24 > {shlex.quote(str(admin))})"


def check_model_database(config: ServeConfig) -> Iterator[Finding]:
    """Whether generated text survives a restart."""
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
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        remedy = "model_database: {snapshot_dir: /var/lib/hdserve}"
        if place.is_dir():
            remedy = f'sudo install -d -o "$USER" {shlex.quote(str(directory))}'
        yield failure(subject, f"{directory} cannot be written", remedy)
    else:
        yield ok(subject, f"{directory}, {shutil.disk_usage(place).free / 2**30:.1f} GiB free")
    for other, what_to_do in left_by_other_versions(directory).items():
        remedy = f"hdserve database export {shlex.quote(str(directory))} old.hdb  # {what_to_do}"
        yield warning(subject, f"{other} is not read", remedy)


def check_device(model: ModelConfig) -> Iterator[Finding]:
    subject = f"{model.name}: device"
    try:
        found = describe_hardware(model.engine.device)
    except ConfigError as error:
        yield failure(subject, error.message, "engine: {device: auto}")
        return
    if found.has_unused_gpu:
        index = "https://download.pytorch.org/whl/cu130"
        text = f"torch {found.torch_version} cannot use this machine's NVIDIA GPU"
        yield warning(subject, text, f"make setup TORCH_INDEX={index}")
        return
    yield ok(subject, f"{found.name}, {found.dtype}, torch {found.torch_version}")
    weights = _weight_bytes(model)
    if weights > found.free_bytes:
        text = f"{weights / 2**30:.1f} GiB of weights, {found.free_bytes / 2**30:.1f} GiB free"
        yield failure(
            f"{model.name}: memory", text, "engine: {dtype: bfloat16}  # or a smaller model"
        )


def check_compiler(model: ModelConfig, *, can_compile: bool | None = None) -> Iterator[Finding]:
    """Whether a model that runs on a CPU can be compiled.

    Args:
        can_compile: instead of what this machine can.
    """
    try:
        is_on_cpu = describe_hardware(model.engine.device).name == "cpu"
    except ConfigError:
        return  # said already
    if model.engine.compile is False or not is_on_cpu:
        return
    subject = f"{model.name}: compiler"
    if compiler_exists() if can_compile is None else can_compile:
        yield ok(subject, "there is a C++ compiler: the model runs compiled")
        return
    make = failure if model.engine.compile is True else warning
    text = "no C++ compiler: the model cannot be compiled, which makes its steps a third faster"
    yield make(subject, text, "sudo apt-get install g++  # or engine: {compile: false}")


def check_model(model: ModelConfig) -> Iterator[Finding]:
    """Whether tokenizer, weights and statistics are there and belong together."""
    subject = f"{model.name}: model"
    try:
        tokenizer = load_tokenizer(
            model.model, model.revision, trust_remote_code=model.trust_remote_code
        )
    except ConfigError as error:
        yield failure(subject, error.message, _download(model))
        return
    if model.chat_template is not None:
        yield _chat_template(model.name, model.chat_template)
    place = Path(resolve_model(model.model))
    if place.is_dir() and not _weight_files(model):
        text = f"{place} has no *.safetensors"
        yield failure(subject, text, _download(model))
        return
    yield ok(subject, f"{model.model}, a vocabulary of {tokenizer.vocab_size:,}")
    yield _statistics(model, tokenizer.fingerprint)


def _download(model: ModelConfig) -> str:
    """What brings the files of a model: into a directory, where one is named."""
    if is_path(model.model) or Path(model.model).is_dir():
        return f"hf download OWNER/MODEL --local-dir {shlex.quote(model.model)}"
    if "/" not in model.model:
        return f"model: {bundled_models()[0]}  # which is bundled; on the hub names are OWNER/MODEL"
    revision = f" --revision {shlex.quote(model.revision)}" if model.revision else ""
    return f"hf download {shlex.quote(model.model)}{revision}"


def _chat_template(name: str, path: Path) -> Finding:
    subject = f"{name}: chat template"
    try:
        read_chat_template(path)
    except ConfigError as error:
        return failure(subject, error.message, "chat_template: null  # or a file with a template")
    return ok(subject, str(path))


def _statistics(model: ModelConfig, fingerprint: str) -> Finding:
    subject = f"{model.name}: statistics"
    tokenizer = shlex.quote(model.model)
    build = f"hdserve statistics build --tokenizer {tokenizer} --input TEXTS --output"
    if model.statistics is None:
        return ok(subject, "are off")
    if model.statistics == "bundled":
        for directory in bundled_statistics():
            if read_info(directory).tokenizer == fingerprint:
                return ok(subject, f"bundled, {read_info(directory).num_tokens:,} tokens")
        return warning(
            subject, "none ships for this tokenizer", f"{build} own  # and statistics: own"
        )
    try:
        info = read_info(Path(model.statistics))
    except SnapshotError as error:
        return failure(subject, error.message, f"{build} {shlex.quote(model.statistics)}")
    if info.tokenizer != fingerprint:
        text = f"{model.statistics} was made with another tokenizer"
        return failure(subject, text, f"{build} {shlex.quote(model.statistics)}")
    return ok(subject, f"{model.statistics}, {info.num_tokens:,} tokens")


def _weight_bytes(model: ModelConfig) -> int:
    return sum(path.stat().st_size for path in _weight_files(model))


def _weight_files(model: ModelConfig) -> list[Path]:
    """Of a local model; those of the hub are not asked for."""
    return list(Path(resolve_model(model.model)).glob("*.safetensors"))

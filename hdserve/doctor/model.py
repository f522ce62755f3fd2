"""What one model needs: a device, a compiler, and files that belong together."""

from __future__ import annotations

import os
import shlex
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from hdserve.config import ModelConfig
from hdserve.databases.statistics_info import INFO_NAME, read_info
from hdserve.doctor.finding import Finding, failure, ok, warning
from hdserve.doctor.permissions import reading_remedy
from hdserve.doctor.problems import statistics_fault
from hdserve.doctor.weights import WHOLE, weight_bytes, weight_faults, weight_files
from hdserve.engine.forward.compiled import can_compile as compiler_exists
from hdserve.engine.hardware.description import Hardware, describe_hardware
from hdserve.engine.loading.loader import read_architecture
from hdserve.engine.loading.quantisation import OTHER_CHECKPOINT, check_quantisation
from hdserve.engine.native.compiler import spaced_directories
from hdserve.engine.tokenization.tokenizer import load_tokenizer
from hdserve.errors import ConfigError, UnsupportedModel
from hdserve.models import bundled_models, bundled_statistics, is_path, resolve_model
from hdserve.models.hub import PICKLED, hub_fault

_OTHER_ARCHITECTURE = "model: OWNER/MODEL  # of another architecture"
_UNCOMPILED = "the model cannot be compiled, which makes its steps much faster"
_OTHER_DIRECTORIES = (
    "engine: {compile: false}  # or Python and packages in directories without spaces, and one for "
    "the cache in TORCHINDUCTOR_CACHE_DIR"
)
_OTHER_CHECKPOINT = f"model: OWNER/MODEL  # {OTHER_CHECKPOINT}"


def check_device(model: ModelConfig, *, is_elsewhere: bool = False) -> Iterator[Finding]:
    """Check that the device exists.

    Args:
        is_elsewhere: replicas are placed on the nodes of a cluster, of which this machine need not
            be one, so what it lacks is no failure.
    """
    subject = f"{model.name}: device"
    try:
        found = _hardware(model, is_elsewhere)
    except ConfigError as error:
        found = describe_hardware("auto")
        if found.has_unused_gpu:
            yield _unused_gpu(warning if is_elsewhere else failure, subject, found)
        elif is_elsewhere:
            text = "torch finds no GPU on this machine; replicas are placed on nodes that have one"
            yield warning(subject, text, "hdserve doctor  # on such a node")
        else:
            yield failure(subject, error.message, "engine: {device: auto}")
        return
    if found.has_unused_gpu:
        yield _unused_gpu(warning, subject, found)
    else:
        yield ok(subject, f"{found.name}, {found.dtype}, torch {found.torch_version}")


def check_weights(model: ModelConfig, *, is_elsewhere: bool = False) -> Iterator[Finding]:
    """Check that the device has memory for the weights, before they are on it.

    Args:
        is_elsewhere: as in :func:`check_device`.
    """
    subject = f"{model.name}: memory"
    try:
        found, weights = _hardware(model, is_elsewhere), weight_bytes(model)
    except ConfigError:
        return  # reported with the device
    if weights is None:
        if not (is_path(model.model) or os.path.isdir(model.model)):  # else reported by check_model
            text = "the weights are not on this machine yet, so their size is not known here"
            yield warning(subject, text, _download(model))
    elif weights > found.free_bytes:
        make = warning if is_elsewhere else failure
        text = f"{weights / 2**30:.1f} GiB of weights, {found.free_bytes / 2**30:.1f} GiB free here"
        yield make(subject, text, "engine: {dtype: bfloat16}  # or a smaller model")


def _hardware(model: ModelConfig, is_elsewhere: bool) -> Hardware:
    """Return what a replica finds; elsewhere, one that reserves a GPU finds that.  Of a GPU's
    memory it takes its part, unless the size of its cache is given.

    Raises:
        ConfigError: there is no such device here.
    """
    device = "cuda" if is_elsewhere and model.num_gpus else model.engine.device
    has_share = model.engine.kv_cache_tokens is None
    return describe_hardware(device, (has_share and model.num_gpus) or 1.0)


def _unused_gpu(make: Callable[[str, str, str], Finding], subject: str, found: Hardware) -> Finding:
    text = f"torch {found.torch_version} cannot use this machine's NVIDIA GPU"
    index = "https://download.pytorch.org/whl/cu130"
    return make(
        subject,
        text,
        f"make setup TORCH_INDEX={index}  # for driver 580 or later; else of an older CUDA",
    )


def check_compiler(model: ModelConfig, *, can_compile: bool | None = None) -> Iterator[Finding]:
    """Check that a model can be compiled, and on a GPU its attention.

    Args:
        can_compile: replaces the result for this machine.
    """
    try:
        found = describe_hardware(model.engine.device)
    except ConfigError:
        return  # reported already
    if model.engine.compile is False:
        return
    subject = f"{model.name}: compiler"
    make = failure if model.engine.compile is True else warning
    if not (compiler_exists() if can_compile is None else can_compile):
        text = f"C++ compiler or headers of Python are missing: {_UNCOMPILED}"
        headers = f"python{sysconfig.get_python_version()}-dev"
        remedy = f"sudo apt-get install g++ {headers}  # or engine: {{compile: false}}"
        yield make(subject, text, remedy)
    elif found.name == "cpu" and (spaced := spaced_directories()):
        text = f"PyTorch's compiler cannot use paths with spaces ({', '.join(spaced)}): "
        yield make(subject, text + _UNCOMPILED, _OTHER_DIRECTORIES)
    else:
        yield ok(subject, "C++ compiler and headers of Python are there: the model runs compiled")


def check_model(model: ModelConfig) -> Iterator[Finding]:
    """Check that tokenizer, weights and statistics exist and belong together."""
    subject = f"{model.name}: model"
    if fault := hub_fault(model.model, model.revision):
        text = f"the hub cannot be asked for {model.model}, which is not on this machine: {fault}"
        yield failure(subject, text, "model: DIRECTORY  # with the model's files, or a way there")
        return
    try:
        tokenizer = load_tokenizer(
            model.model, model.revision, trust_remote_code=model.trust_remote_code
        )
    except ConfigError as error:
        unserved = _why_unserved(model)
        remedy = _OTHER_ARCHITECTURE if unserved else _download(model)
        yield failure(subject, unserved or error.message, remedy)
        return
    place = Path(resolve_model(model.model))
    faults = [*weight_faults(model)] if place.is_dir() else []
    if faults:
        yield failure(subject, "; ".join(faults), _download(model))
        return
    if place.is_dir() and not weight_files(model):
        text = f"{place} has no {WHOLE}"
        if any(place.glob(PICKLED)):
            remedy = "load_format: auto  # which loads pickled weights; they can run code"
            yield failure(subject, f"{text}, but {PICKLED}", remedy)
        else:
            yield failure(subject, text, _download(model))
        return
    try:
        architecture = read_architecture(model)
    except (ConfigError, UnsupportedModel) as error:
        yield failure(subject, error.message, _OTHER_ARCHITECTURE)
        return
    try:
        check_quantisation(architecture)
    except ConfigError as error:
        yield failure(subject, error.message, "python -m pip install 'hdserve[quantized]'")
        return
    except ValueError as error:
        yield failure(subject, str(error), _OTHER_CHECKPOINT)
        return
    yield ok(subject, f"{model.model}, a vocabulary of {tokenizer.vocab_size:,}")
    yield _statistics(model, tokenizer.fingerprint)


def _why_unserved(model: ModelConfig) -> str:
    """Why its architecture is not served; empty if it is, or is not known."""
    with suppress(ConfigError):
        try:
            read_architecture(model)
        except UnsupportedModel as error:
            return error.message
    return ""


def _download(model: ModelConfig) -> str:
    """Return the command that downloads the model's files, into its directory if it names one."""
    if os.path.isdir(model.model) and not os.path.exists(f"{model.model}/config.json"):
        return "model: OWNER/MODEL  # or a directory with config.json, tokenizer and weights"
    if is_path(model.model) or os.path.isdir(model.model):
        return f"hf download OWNER/MODEL --local-dir {shlex.quote(model.model)}"
    if "/" not in model.model:
        return f"model: {bundled_models()[0]}  # which is bundled; on the hub names are OWNER/MODEL"
    revision = f" --revision {shlex.quote(model.revision)}" if model.revision else ""
    return f"hf download {shlex.quote(model.model)}{revision}"


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
    directory = Path(model.statistics)
    if fault := statistics_fault(model.statistics, fingerprint):
        opening = reading_remedy(directory / INFO_NAME)
        return warning(subject, fault, opening or f"{build} {shlex.quote(model.statistics)}")
    return ok(subject, f"{directory}, {read_info(directory).num_tokens:,} tokens")

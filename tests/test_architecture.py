"""Imports point one way, and the heavy libraries stay in their homes (docs/walk.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from hdserve.shadows import PACKAGES

ROOT = Path(__file__).parent.parent

LAYERS = {
    "hdserve.errors": 0,
    "hdserve.arguments": 2,
    "hdserve.cluster_address": 1,
    "hdserve.completion": 2,
    "hdserve.conversation": 1,
    "hdserve.grammar": 1,
    "hdserve.direct_http": 1,
    "hdserve.journal": 1,
    "hdserve.ports": 1,
    "hdserve.process_session": 1,
    "hdserve.prompts": 1,
    "hdserve.schema": 1,
    "hdserve.shadows": 1,
    "hdserve.core": 1,
    "hdserve.tree": 1,
    "hdserve.models": 1,
    "hdserve.noise": 1,
    "hdserve.config": 2,
    "hdserve.access": 3,
    "hdserve.current_access": 3,
    "hdserve.telemetry": 3,
    "hdserve.databases": 3,
    "hdserve.drafting": 4,
    "hdserve.engine": 5,
    "hdserve.bench": 6,
    "hdserve.llm": 6,
    "hdserve.doctor": 6,
    "hdserve.cli": 7,
    "hdserve": 7,
    "actors": 4,
    "deployments.events": 8,
    "deployments.generation": 8,
    "deployments.off_loop": 8,
    "deployments.prediction": 8,
    "deployments.request_faults": 8,
    "deployments.tracing": 9,
    "deployments.metrics": 8,
    "deployments.parsers": 8,
    "deployments.openai": 9,
    "deployments.anthropic": 10,
    "deployments.replica": 10,
    "deployments.http": 11,
    "deployments": 11,
}
"""A module imports only from its own layer and lower ones; the longest prefix counts."""

ENGINE = (
    *("faults", "request_check", "stats"),
    *("tokenization", "structured_output"),
    *("hardware", "kernels", "gpu_kernels"),
    *("kv_cache", "batch", "attention", "linear", "native"),
    *("sampling", "forward", "loading", "scheduling"),
    *("decoder", "decoder_factory", "engine", "async_engine", "build", "host"),
)
"""The parts of ``hdserve.engine``: a module imports only from its own part and those before it."""

HOMES = {
    "torch": ("hdserve.engine", "hdserve.bench.contenders", "hdserve.bench.random_weights"),
    "transformers": ("hdserve.engine", "hdserve.bench.contenders", "hdserve.bench.random_weights"),
    "ray": ("actors", "deployments"),
    "fastapi": ("deployments.http", "deployments.gateway"),
    "starlette": ("deployments.http", "deployments.gateway"),
}


def _modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def _imports(path: Path) -> tuple[str, ...]:
    return tuple(_read_imports(path))


def _read_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def _layer(name: str) -> int | None:
    return next((LAYERS[prefix] for prefix in _prefixes(name) if prefix in LAYERS), None)


def _part(name: str) -> str | None:
    """The part of the engine that a name is in."""
    return name.split(".")[2] if name.startswith("hdserve.engine.") else None


MODULES = dict(_modules())


def _without_a_layer(module: str) -> bool:
    """Whether a module has none, or one of ``hdserve`` just that of the whole."""
    *parts, root = _prefixes(module)
    return _layer(module) is None or (
        bool(parts) and root == "hdserve" and not LAYERS.keys() & parts
    )


def test_every_module_has_a_layer() -> None:
    assert [module for module in MODULES if _without_a_layer(module)] == []


def test_imports_point_to_lower_layers() -> None:
    """No module imports from a layer above its own."""
    found = []
    for module, path in MODULES.items():
        own = _layer(module)
        for imported in _imports(path):
            layer = _layer(imported)
            if own is not None and layer is not None and layer > own:
                found.append(f"{module} imports {imported}")
    assert found == []


def test_every_module_of_the_engine_has_a_place() -> None:
    assert [module for module in MODULES if _part(module) not in {None, *ENGINE}] == []


def test_imports_within_the_engine_point_to_earlier_parts() -> None:
    """Those within functions and for annotations, too."""
    found = []
    for module, path in MODULES.items():
        part = _part(module)
        if part not in ENGINE:
            continue
        allowed = {None, *ENGINE[: ENGINE.index(part) + 1]}
        found += [
            f"{module} imports {name}" for name in _imports(path) if _part(name) not in allowed
        ]
    assert found == []


def test_heavy_libraries_stay_at_home() -> None:
    """Ray, torch, transformers and FastAPI are imported in their homes alone."""
    found = []
    for module, path in MODULES.items():
        for imported in _imports(path):
            homes = HOMES.get(imported.split(".")[0])
            if homes is not None and not any(prefix in homes for prefix in _prefixes(module)):
                found.append(f"{module} imports {imported}")
    assert found == []


WITHOUT_TORCH = (
    "hdserve.cli.commands",
    "actors.mirror",
    "deployments.http.routes",
    "deployments.application",
)

PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""


def test_processes_without_a_model_do_without_torch() -> None:
    """A command, an actor, a gateway and what builds the application: it is seconds of their start
    and 200 MB."""
    subprocess.run([sys.executable, "-c", PROBE, *WITHOUT_TORCH], check=True)


def test_packages_do_not_import_tests() -> None:
    """What is installed does not need what is not."""
    found = [
        f"{module} imports {imported}"
        for module, path in MODULES.items()
        for imported in _imports(path)
        if imported.split(".")[0] in {"tests", "tools", "benchmarks"}
    ]
    assert found == []

"""Compiled code is kept, and out of date as soon as a module changes that is compiled with it."""

from __future__ import annotations

import ast
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hdserve.databases import ngram
from hdserve.databases.kernel_cache import (
    BASELINES,
    COMPILED_INTO_ALL,
    KernelCache,
    sources_digest,
)
from hdserve.drafting import growth, observing
from hdserve.engine.kernels import attention
from hdserve.engine.kernels.registers import HAS_AVX512

PACKAGE = Path(ngram.__file__).parents[1]
COMPILERS = {
    "hdserve.databases.compiled",
    "hdserve.databases.kernel_cache",
    "hdserve.engine.kernels.compiled",
}
"""What compiles is in nothing that is compiled."""

LOADED = """
import numpy as np
from hdserve.databases.cache_lines import new_lines
from hdserve.databases.ngram import rebase_stamps
from hdserve.engine.kernels.moves import move_rows
rebase_stamps(new_lines(1), 0, 0)
move_rows(0, 0, 0, 0, np.zeros((0, 2), np.int64), np.zeros((1, 16), np.float32))
for function in (rebase_stamps, move_rows):
    print(sum(function.stats.cache_hits.values()))
"""
"""Calls a function of the databases and one of the engine; says which was not compiled for it."""


INTERRUPTED = """
from hdserve.databases.cache_lines import new_lines
from hdserve.databases.ngram import rebase_stamps

def interrupt(*arguments):
    raise KeyboardInterrupt

rebase_stamps._compiler.compile = interrupt
try:
    rebase_stamps(new_lines(1), 0, 0)
except KeyboardInterrupt:
    del rebase_stamps._compiler.compile
rebase_stamps(new_lines(1), 0, 0)
print(int(rebase_stamps._cache._lock.is_locked))
"""
"""Compiles a function the second time; says whether others still wait for it."""


IN_C = """
import sys
import numba
from hdserve.engine.kernels.compiled import address_in_c, entry_point

@entry_point
def nothing(number: int, other: float) -> None:
    pass

if sys.argv[1] == "in C":
    address_in_c(nothing, numba.void(numba.int64, numba.float64))
else:
    nothing(1, 1.0)
print(sum(nothing.stats.cache_hits.values()))
"""
"""Compiles a function for callers in C, or by calling it; says whether it was compiled before."""


FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
""" + LOADED.replace(
    "rebase_stamps(new", "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\nrebase_stamps(new"
)
"""The same, where no file can be written to any longer."""

CHANGED = """
from hdserve.databases import kernel_cache
kernel_cache.sources_digest = lambda folder: "changed"
"""
"""Before another program: its sources are not those that code was compiled from."""

NOWHERE = (
    """
from hdserve.databases import kernel_cache
kernel_cache._Implementation._locator_classes = []
"""
    + LOADED
)
"""The same, where there is no place for code."""


def start(cache: Path, settings: Mapping[str, str], program: str = LOADED) -> subprocess.Popen[str]:
    """``program`` in a process whose compiled code is kept in ``cache``."""
    return started(cache, settings, "-c", program)


def started(cache: Path, settings: Mapping[str, str], *program: str) -> subprocess.Popen[str]:
    environment = os.environ | settings | {"NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, *program]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def hits(process: subprocess.Popen[str]) -> list[str]:
    shown, _ = process.communicate()
    assert process.returncode == 0
    return shown.split()


def make_sources(root: Path, text: str) -> Path:
    for folder in ("databases", "drafting", "kernels"):
        (root / folder).mkdir(parents=True)
        (root / folder / "one.py").write_text("ONE = 1\n")
    (root / "drafting" / "two.py").write_text(text)
    return root


def imports(path: Path) -> set[str]:
    """The modules that a module imports from."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def with_kernels(folder: Path) -> Iterator[Path]:
    """The modules of ``folder`` that have parts of kernels."""
    for path in sorted(folder.glob("*.py")):
        if any(name.split(".")[0] == "numba" or name in COMPILERS for name in imports(path)):
            yield path


@pytest.mark.parametrize("folders", [("databases", "drafting"), ("engine/kernels",)], ids=str)
def test_what_kernels_import_is_part_of_their_digest(folders: Sequence[str]) -> None:
    """Constants of modules of other folders, too, are in what is compiled."""
    own = tuple(f"hdserve.{folder.replace('/', '.')}." for folder in folders)
    found = {
        name
        for folder in folders
        for path in with_kernels(PACKAGE / folder)
        for name in imports(path)
        if name.startswith("hdserve.") and not f"{name}.".startswith(own) and name not in COMPILERS
    }
    elsewhere = {f"{name.replace('.', '/')}.py" for name in found}
    assert elsewhere <= {str(path.relative_to(PACKAGE.parent)) for path in COMPILED_INTO_ALL}


def test_what_python_calls_as_it_is_is_part_of_each_digest() -> None:
    """Kernels of any folder compile it."""
    found = {path for path in PACKAGE.rglob("*.py") if "@register_jitable" in path.read_text()}
    assert found <= set(COMPILED_INTO_ALL)


def test_any_change_changes_the_digest(tmp_path: Path) -> None:
    """Of what is compiled together: databases and drafting are, other folders are by themselves."""
    first = make_sources(tmp_path / "first", "TWO = 2\n")
    same = make_sources(tmp_path / "same", "TWO = 2\n")
    changed = make_sources(tmp_path / "changed", "TWO = 3\n")
    for folder in ("databases", "drafting"):
        before, again, after = (sources_digest(root / folder) for root in (first, same, changed))
        assert before == again != after
    kernels = sources_digest(first / "kernels")
    assert kernels == sources_digest(changed / "kernels") != sources_digest(first / "drafting")


@pytest.mark.parametrize(
    "function",
    [ngram.insert_tokens, growth.grow_tree, observing.observe_step, attention.attend],
)
def test_entry_points_are_kept_under_the_digest(function: Any) -> None:
    """What serves is loaded from a cache that knows about all modules."""
    cache = function._cache
    assert isinstance(cache, KernelCache)
    folder = Path(function.py_func.__code__.co_filename).parent
    assert cache._impl.locator.get_source_stamp() == sources_digest(folder)


def test_code_that_was_compiled_for_the_baseline_is_taken(tmp_path: Path) -> None:
    """As in an image; the engine's kernels are compiled once more where they would use AVX-512."""
    name = BASELINES[platform.machine()][0]
    baseline = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ""}
    found = [hits(start(tmp_path, settings)) for settings in (baseline, {}, {})]
    assert found == [["0", "0"], ["1", "0" if HAS_AVX512 else "1"], ["1", "1"]]


@pytest.mark.parametrize("program", [FULL, NOWHERE], ids=["full", "nowhere"])
def test_what_cannot_be_kept_is_compiled_all_the_same(program: str, tmp_path: Path) -> None:
    assert hits(start(tmp_path, {}, program)) == ["0", "0"]


def test_code_of_other_sources_is_gone_where_new_code_cannot_be_kept(tmp_path: Path) -> None:
    """A full disk may have room for the index, which says that code is new, and none for code."""
    assert hits(start(tmp_path, {})) == ["0", "0"]
    assert hits(start(tmp_path, {}, CHANGED + FULL.replace("(0, 0)", "(4096, 4096)"))) == ["0", "0"]
    assert [*tmp_path.rglob("*.nbi")]
    assert hits(start(tmp_path, {}, CHANGED + LOADED)) == ["0", "0"]


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("num_kept_bytes", [0, 40])
def test_code_that_a_crash_cut_short_is_compiled_again(
    num_kept_bytes: int, kind: str, tmp_path: Path
) -> None:
    assert hits(start(tmp_path, {})) == ["0", "0"]
    for path in tmp_path.rglob(f"*.{kind}"):
        path.write_bytes(path.read_bytes()[:num_kept_bytes])
    found = [hits(start(tmp_path, {})) for _ in range(2)]
    assert found == [["0", "0"], ["1", "1"]]


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    processes = [start(tmp_path, {}) for _ in range(3)]
    found = [hits(process) for process in processes]
    assert [sorted(counts) for counts in zip(*found, strict=True)] == [["0", "1", "1"]] * 2


def test_nobody_waits_for_what_was_interrupted_and_compiled_then(tmp_path: Path) -> None:
    assert hits(start(tmp_path, {}, INTERRUPTED)) == ["0"]


@pytest.mark.parametrize("callers", [("in C", "in Python"), ("in Python", "in C")], ids=str)
def test_callers_in_c_and_in_python_have_the_same_code(
    callers: tuple[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(IN_C)
    found = [hits(started(tmp_path / "cache", {}, str(program), caller)) for caller in callers]
    assert found == [["0"], ["1"]]

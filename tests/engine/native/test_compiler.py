"""What comes as C++ is compiled once on a machine, and says why it cannot be."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hdserve.engine.forward.compiled import can_compile
from hdserve.engine.native import compiler, operators
from hdserve.engine.native.compiler import compile_library, find_compiler

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hdserve"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


@pytest.mark.skipif("CXX" in os.environ, reason="it says which compiler is taken")
def test_a_compiler_that_the_machine_has_is_taken() -> None:
    """So that no test is skipped for the want of it."""
    found = shutil.which("clang++" if sys.platform == "darwin" else "g++")
    assert find_compiler() == found
    headers = Path(sysconfig.get_path("include"), "Python.h")
    assert can_compile() is (found is not None and headers.exists())


@needs_compiler
def test_what_is_compiled_needs_the_headers_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system may have the one without the other."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    assert not can_compile()
    (tmp_path / "Python.h").touch()
    assert can_compile()


@needs_compiler
def test_it_is_compiled_once(source: Path, folder: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = {*pool.map(compile_library, [source] * 3)}
    (library,) = found
    assert ctypes.CDLL(str(library)).answer() == 42
    assert [*folder.glob("*.so")] == [library]
    made_at = library.stat().st_mtime_ns
    assert compile_library(source).stat().st_mtime_ns == made_at


@needs_compiler
def test_another_source_is_another_library(source: Path) -> None:
    before = compile_library(source)
    source.write_text(SOURCE.replace("42", "43"))
    after = compile_library(source)
    assert ctypes.CDLL(str(before)).answer() == 42
    assert ctypes.CDLL(str(after)).answer() == 43


@needs_compiler
def test_machines_of_another_kind_have_a_library_of_their_own(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same directory: they could not load each other's."""
    found = {compile_library(source)}
    monkeypatch.setattr(platform, "machine", lambda: "another")
    found.add(compile_library(source))
    path, real = tmp_path / "c++", find_compiler()
    monkeypatch.setattr(compiler, "find_compiler", lambda: str(path))
    for version in (1, 2):
        path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} || exec {real} "$@"\n')
        path.chmod(0o755)
        found.add(compile_library(source))
    assert len(found) == 4


@needs_compiler
def test_what_the_compiler_says_is_told_in_short(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")  # others have other words for an error
    source.write_text("this is not C++;\n" * 1_000)
    with pytest.raises(OSError, match=r"failed: .*error") as caught:
        compile_library(source)
    assert len(str(caught.value)) < 500
    assert not [*folder.glob("*.so")]


@needs_compiler
@pytest.mark.parametrize("is_hidden", [False, True])
def test_vector_instructions_are_those_that_a_process_can_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_hidden: bool
) -> None:
    """The process that PyTorch starts finds modules where this one does: also one that hides
    Python's own."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    if is_hidden:
        (tmp_path / "ctypes.py").write_text("raise ImportError")
    program = (
        "import sys, hdserve.engine.native.compiler as compiler; "
        f"sys.path.insert(0, {str(tmp_path)!r}); print(compiler.vector_instructions())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert bool(done.stdout.strip()) is not is_hidden


def test_without_one_python_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    assert operators._load_once.__wrapped__() is None
    assert "there is no C++ compiler" in caplog.text

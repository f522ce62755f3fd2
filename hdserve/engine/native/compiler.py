"""Compiling the C++ sources, once on each machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from filelock import FileLock
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

_TORCH: Final = Path(torch.__file__).parent
_OPTIONS: Final = (
    *("-std=c++20", "-O2", "-shared", "-fPIC"),
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    *("-isystem", str(_TORCH / "include")),
    *("-L", str(_TORCH / "lib"), "-ltorch_cpu", "-lc10"),
)
_MAX_S = 300.0
_SHOWN_CHARACTERS = 300


def find_compiler() -> str | None:
    """The C++ compiler that PyTorch uses, so ``CXX`` if that is set; ``None`` if it does not
    exist."""
    with suppress(InvalidCxxCompiler):
        return shutil.which(get_cpp_compiler())
    return None


def vector_instructions() -> str:
    """The vector instructions, and tiles, in the code of PyTorch's compiler; empty if there are
    none.

    They are those of the processor that the C++ compiler knows, too, if a process that PyTorch
    starts can load code with them.  It tries that once, which takes seconds.
    """
    try:
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        found = pick_vec_isa()
    except Exception:  # there is no compiler, or nothing can be stored: compiling says so
        return ""
    return str(found) if found.bit_width() else ""


def spaced_directories() -> list[str]:
    """Return the directories that PyTorch's compiler for CPUs needs and cannot use: their paths
    have white space, and it writes them into a command line as they are."""
    found = [str(Path(torch.__file__).parent), str(sysconfig.get_config_var("LIBDIR"))]
    with suppress(OSError):  # nothing can be stored: compiling says so
        found.append(cache_dir())
    return [path for path in found if len(path.split()) > 1]


def compile_library(source: Path) -> Path:
    """Compile ``source``, which may use PyTorch's C++ interface, to a shared library.

    It is stored next to the code of PyTorch's own compiler, for this kind of processor and version
    of the C++ compiler: machines may share the directory.  Processes that want it at the same time
    compile it once.

    Raises:
        OSError: there is no compiler, it failed, or its output cannot be stored.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler")
    made_by = platform.machine(), compiler, _version(compiler), torch.__version__
    made_of = source.read_bytes(), *made_by, *_OPTIONS
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    folder = Path(cache_dir(), "hdserve")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{source.stem}-{digest}.so"
    if not library.exists():
        with FileLock(library.with_suffix(".lock"), timeout=_MAX_S):
            if not library.exists():
                _compile(compiler, source, library)
    return library


def _version(compiler: str) -> str:
    """
    Raises:
        OSError: it cannot be run.
    """
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    return done.stdout


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Compile to another file first, so that nobody sees an incomplete library."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        command = [compiler, str(source), "-o", str(made), *_OPTIONS]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_MAX_S)
        except subprocess.TimeoutExpired as error:
            raise OSError(f"{compiler} took longer than {_MAX_S:.0f} s") from error
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[:_SHOWN_CHARACTERS]}")
        with made.open("rb") as file:
            os.fsync(file.fileno())  # else a crash of the machine may leave an empty file
        os.replace(made, library)

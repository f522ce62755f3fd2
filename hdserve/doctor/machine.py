"""What a machine has: Python, packages, Ray, a cluster that answers, a free port."""

from __future__ import annotations

import errno
import http.client
import shlex
import shutil
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

from hdserve.cluster_address import host_and_port, why_unanswered
from hdserve.direct_http import open_directly
from hdserve.doctor.finding import Finding, failure, ok, warning
from hdserve.ports import listening_error
from hdserve.shadows import shadows

MIN_SHARED_MEMORY_BYTES = 2**30

_MIN_PYTHON = (3, 11)
_IMPORT_TIMEOUT_S = 120.0
_HTTP_TIMEOUT_S = 2.0
_HOST = "127.0.0.1"
_MIN_PORT, _MAX_PORT = 1024, 65535
_OWN_TITLE = b'"title":"hdserve"'
"""A text near the beginning of hdserve's ``/openapi.json``, and in no other server's."""

PROXY_ANSWERS = frozenset(
    {
        "success",
        "Route table is not populated yet.",
        "No replicas are available yet.",
        "This node is being drained.",
        "Service Unavailable",  # HAProxy, when no gateway is left behind it
    }
)
"""What Ray Serve's proxies say to ``/-/healthz``."""


def check_python() -> Iterator[Finding]:
    """Check that this Python is new enough."""
    found = sys.version.split()[0]
    if sys.version_info < _MIN_PYTHON:
        yield failure("Python", f"{found} is too old", "make setup PYTHON=python3.11")
    else:
        yield ok("Python", found)


def check_packages(distribution: str = "hdserve") -> Iterator[Finding]:
    """Check that each dependency is installed, in a version the project accepts."""
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
    """Check that Ray Serve can be imported, in a separate process, and has shared memory for
    objects."""
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
    """Check that something listens at the address of the cluster."""
    if host_and_port(address) is None:
        return
    if reason := why_unanswered(address):
        remedy = "unset RAY_ADDRESS  # for a cluster of its own; or there: ray start --head"
        yield failure("Ray cluster", f"nobody answers at {address}: {reason}", remedy)
    else:
        yield ok("Ray cluster", f"somebody listens at {address}")


def check_port(port: int) -> Iterator[Finding]:
    """Check that ``serve run`` can listen, or that hdserve already does."""
    error = listening_error(_HOST, port)
    if error is None:
        yield ok("port", f"{port} is free")
    else:
        yield _closed_port(port) if error.errno == errno.EACCES else _taken_port(port)


def _closed_port(port: int) -> Finding:
    text = f"nobody but root may listen on {port}"
    return failure("port", text, f"hdserve serve --port {_free_port(_MIN_PORT - 1)}")


def hdserve_answers(port: int) -> bool:
    """Return whether hdserve answers here on ``port``."""
    return _OWN_TITLE in _answer(port, "/openapi.json")


def _taken_port(port: int) -> Finding:
    if hdserve_answers(port):
        return ok("port", f"hdserve answers on {port}")
    if _answer(port, "/-/healthz").decode(errors="replace").strip() in PROXY_ANSWERS:
        text = f"Ray Serve's proxy listens on {port}, but the application does not answer"
        return failure("port", text, "serve status  # why it does not; on Kubernetes, in the head")
    text = f"another program listens on {port}; 'ss -ltnp' shows which"
    return failure("port", text, f"hdserve serve --port {_free_port(port)}")


def _answer(port: int, path: str) -> bytes:
    """Return how the answer of a server of this machine begins; empty if it does not answer, or
    not by HTTP."""
    with suppress(OSError, ValueError, http.client.HTTPException):
        url = f"http://{_HOST}:{port}{path}"
        try:
            with open_directly(url, _HTTP_TIMEOUT_S) as answer:
                return bytes(answer.read(1000))
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.read(1000)
    return b""


def _free_port(taken: int) -> int:
    """Return the next free port; ``taken`` if there is none."""
    ports = chain(range(taken + 1, _MAX_PORT + 1), range(_MIN_PORT, taken))
    return next((port for port in ports if listening_error(_HOST, port) is None), taken)

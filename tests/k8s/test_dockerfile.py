"""The image is what the pods need."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from hdserve.cli.commands import app as hdserve_app
from hdserve.config.deployed import PROXY_VARIABLES
from hdserve.databases.kernel_cache import BASELINES
from tests.k8s.manifests import K8S, OVERLAYS, ROOT, groups, init_container, ray_service

DOCKERFILE = (K8S / "Dockerfile").read_text()

TRIPLES = {"amd64": "x86_64-unknown-linux-gnu", "arm64": "aarch64-unknown-linux-gnu"}
"""LLVM's names of what Docker calls ``TARGETARCH``."""

MAKE_TARGET = """
import sys
import llvmlite.binding as llvm
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
llvm.Target.from_triple(sys.argv[1]).create_target_machine(cpu=sys.argv[2])
"""


def stages() -> dict[str, tuple[str, str]]:
    """By name: what each begins from, and its lines."""
    found = re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    return {name: (base, text) for base, name, text in found}


def test_stages() -> None:
    """Another user than root at the end, and what the project fixed the versions of."""
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    user, _, group = users[-1].partition(":")
    for overlay in OVERLAYS:
        for worker in groups(ray_service(overlay)):
            security = worker["template"]["spec"]["securityContext"]
            assert (str(security["runAsUser"]), str(security["runAsGroup"])) == (user, group)
    assert "--constraint constraints.txt" in DOCKERFILE
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        for path in copied.split():
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("program", ["bash", "g++", "wget"])
def test_programs(program: str) -> None:
    """KubeRay's probes call two of them, and PyTorch compiles models with the third."""
    (installed,) = re.findall(r"apt-get install (.*)", DOCKERFILE)
    assert program in installed.split()


def test_the_standard_library_is_compiled() -> None:
    """That of the image's Python, which comes without; pods could not keep what they compile."""
    (version,) = re.findall(r"^ARG PYTHON_IMAGE=python:(\d+\.\d+)", DOCKERFILE, re.MULTILINE)
    _, text = stages()["runtime"]
    assert f"    && python -m compileall -q /usr/local/lib/python{version} \\\n" in text


def test_a_login_shell_finds_the_programs() -> None:
    """What is sourced there has them found, whatever ``PATH`` was set to before."""
    (line,) = re.findall(r"echo '(.*)' > /etc/profile\.d/\w+\.sh$", DOCKERFILE, re.MULTILINE)
    (path,) = re.findall(r"^ENV PATH=([^$:]+):\$PATH \\$", DOCKERFILE, re.MULTILINE)
    command = ["bash", "-c", f"PATH=/usr/bin\n{line}\necho $PATH"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout == f"{path}:/usr/bin\n"


def test_compiled_code_is_where_the_pods_take_it_from() -> None:
    """And the image's user may add to it, without which numba takes nothing from it."""
    assert 'chown --recursive hdserve:hdserve "${NUMBA_CACHE_DIR}"' in DOCKERFILE
    (cache,) = re.findall(r"NUMBA_CACHE_DIR=(\S+)", DOCKERFILE)
    for group in groups(ray_service("multi-model"))[1:]:
        command = init_container(group["template"]["spec"], "numba-cache")["command"]
        assert f"{cache}/." in command


@pytest.mark.parametrize("architecture", TRIPLES)
def test_compiled_code_is_for_the_images_architecture(architecture: str) -> None:
    """A baseline that pods take code of; LLVM knows it: of one it does not know it makes code for
    another, and says so.  Only the build compiles for it."""
    found = stages()
    last = list(found)[-1]
    base = found[last][0].replace("${TARGETARCH}", architecture)
    (name,) = re.findall(r"BASELINE_CPU=(\S+)", found[base][1])
    assert name == BASELINES[TRIPLES[architecture].split("-")[0]][0]
    assert re.findall(r"NUMBA_CPU_NAME=(\S+)", found[last][1]) == ['"${BASELINE_CPU}"']
    assert not re.search(r"^ENV .*NUMBA_CPU", DOCKERFILE, re.MULTILINE)
    command = [sys.executable, "-c", MAKE_TARGET, TRIPLES[architecture], name]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stderr == ""


def test_processors_that_llvm_does_not_know_are_told() -> None:
    """Or the test above could not fail."""
    command = [sys.executable, "-c", MAKE_TARGET, TRIPLES["arm64"], "x86-64-v3"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "not a recognized processor" in result.stderr


def test_the_image_by_itself_is_reached_from_outside() -> None:
    """Its command listens on every interface of the container, and can be parsed."""
    (line,) = re.findall(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE)
    program, name, *arguments = json.loads(line)
    assert (program, name) == ("hdserve", "serve")
    command = get_command(hdserve_app).commands[name]  # type: ignore[attr-defined]
    assert command.make_context(name, arguments).params["host"] == "0.0.0.0"


def test_proxies_obey_no_headers_of_clients() -> None:
    """In pods they are started before anything of ours is known."""
    for name, value in PROXY_VARIABLES.items():
        assert f"{name}={value} " in DOCKERFILE

"""The image is what the pods need."""

from __future__ import annotations

import re

import pytest

from tests.k8s.manifests import K8S, OVERLAYS, ROOT, groups, init_container, ray_service

DOCKERFILE = (K8S / "Dockerfile").read_text()


def test_stages() -> None:
    """Another user than root at the end, and what the project fixed the versions of."""
    lines = DOCKERFILE.splitlines()
    assert len([line for line in lines if line.startswith("FROM ")]) == 2
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
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


def test_compiled_code_is_where_the_pods_take_it_from() -> None:
    (cache,) = re.findall(r"NUMBA_CACHE_DIR=(\S+)", DOCKERFILE)
    for group in groups(ray_service("multi-model"))[1:]:
        command = init_container(group["template"]["spec"], "numba-cache")["command"]
        assert f"{cache}/." in command

"""Running what the pods run, on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.k8s.manifests import Manifest, groups, ray_service


def worker_pods(overlay: str) -> list[Manifest]:
    return [group["template"]["spec"] for group in groups(ray_service(overlay))[1:]]


def start_as_the_pod(
    pod: Manifest, container: Manifest, places: Mapping[str, Path]
) -> subprocess.Popen[str]:
    """Start what a container runs as the user it runs as, which takes root, with directories of
    this machine in place of those it names."""
    command = container["command"]
    for old, new in places.items():
        command = [word.replace(old, str(new)) for word in command]
    security = pod["securityContext"]
    return subprocess.Popen(
        command,
        user=security["runAsUser"],
        group=security["runAsGroup"],
        extra_groups=[security["fsGroup"]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_as_the_pod(
    pod: Manifest, container: Manifest, places: Mapping[str, Path]
) -> subprocess.CompletedProcess[str]:
    """The same, until it has ended."""
    with start_as_the_pod(pod, container, places) as process:
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def make_empty_dir(path: Path, pod: Manifest) -> None:
    """As the kubelet makes the root of an ``emptyDir``."""
    path.mkdir()
    os.chown(path, 0, pod["securityContext"]["fsGroup"])
    path.chmod(0o2777)

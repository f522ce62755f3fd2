"""The pods start as an ordinary user with a read-only root."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest

from tests.k8s.manifests import (
    OVERLAYS,
    WITH_PODS,
    environment,
    groups,
    init_container,
    pod_specs,
    ray_service,
    render,
)
from tests.k8s.pods import make_empty_dir, run_as_the_pod, worker_pods

DIRECTORIES = ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME")
IMAGE_CACHE = "/opt/hdserve/numba-cache"


def gibibytes(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_compiled_code_is_copied(overlay: str, place: Path) -> None:
    """The root of an ``emptyDir`` is root's, whose times and mode nobody else may set; what was
    interrupted is begun again."""
    for number, pod in enumerate(worker_pods(overlay)):
        container = init_container(pod, "numba-cache")
        (mount,) = container["volumeMounts"]
        image, volume = place / f"image-{number}", place / f"volume-{number}"
        (image / "module_1").mkdir(parents=True)
        (image / "module_1" / "code.nbi").write_text("compiled")
        make_empty_dir(volume, pod)
        for _ in range(2):
            result = run_as_the_pod(
                pod, container, {IMAGE_CACHE: image, mount["mountPath"]: volume}
            )
            assert result.returncode == 0, result.stderr
        numba = environment(pod["containers"][0])["NUMBA_CACHE_DIR"]
        copied = volume / PurePath(numba).relative_to(mount["mountPath"]) / "module_1"
        assert (copied / "code.nbi").read_text() == "compiled"
        assert copied.stat().st_uid == pod["securityContext"]["runAsUser"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_compiled_code_gets_a_directory_of_its_own(overlay: str) -> None:
    """Not the root of the volume; this is checked where the test above cannot run."""
    for pod in worker_pods(overlay):
        container = init_container(pod, "numba-cache")
        *command, target = container["command"]
        assert command == ["cp", "-r", f"{IMAGE_CACHE}/."]
        (mount,) = container["volumeMounts"]
        assert PurePath(mount["mountPath"]) in PurePath(target).parents


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_written_has_a_place(overlay: str) -> None:
    """Caches of compiled code, downloaded weights, the home and temporary files are below mounts
    that can be written."""
    for pod in worker_pods(overlay):
        (container,) = pod["containers"]
        named = environment(container)
        mounts = {
            PurePath(mount["mountPath"]): mount.get("readOnly", False)
            for mount in container["volumeMounts"]
        }
        for path in [*map(named.__getitem__, DIRECTORIES), "/home/hdserve", "/tmp"]:
            around = [mount for mount in mounts if PurePath(path).is_relative_to(mount)]
            assert around, f"{path} is on the read-only root"
            assert not mounts[max(around, key=lambda mount: len(mount.parts))], path


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_compiled_models_stay_in_their_pod(overlay: str) -> None:
    """The compiler makes code for the processor it runs on, and who writes into its cache runs code
    in the pod: no volume that other pods mount."""
    for pod in worker_pods(overlay):
        (container,) = pod["containers"]
        cache = PurePath(environment(container)["TORCHINDUCTOR_CACHE_DIR"])
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (around,) = (
            volumes[mount["name"]]
            for mount in container["volumeMounts"]
            if cache.is_relative_to(mount["mountPath"])
        )
        assert "emptyDir" in around


@pytest.mark.parametrize("target", WITH_PODS)
def test_what_is_written_to_a_node_is_bounded(target: str) -> None:
    """A pod that writes without an end is evicted, and not those beside it."""
    for pod in pod_specs(render(target)):
        for volume in pod.get("volumes", ()):
            if "emptyDir" in volume:
                assert gibibytes(volume["emptyDir"]["sizeLimit"]) > 0, volume["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_logs_fit_their_volume(overlay: str) -> None:
    """Those of fifty processes, each log as long as Ray lets it become, in half of it; a node is
    chosen that has some room for them.  With the autoscaler, those of the head are on the volume
    that KubeRay mounts, and makes without a bound where there is none of its name."""
    service = ray_service(overlay)
    cluster = service["spec"]["rayClusterConfig"]
    autoscaler = cluster["autoscalerOptions"]
    assert cluster["enableInTreeAutoscaling"] is True
    for group in groups(service):
        pod = group["template"]["spec"]
        name = "ray-logs" if group is cluster["headGroupSpec"] else "tmp"
        (logs,) = (volume for volume in pod["volumes"] if volume["name"] == name)
        for container in (*pod["containers"], autoscaler):
            named = environment(container)
            num_files = int(named["RAY_ROTATION_BACKUP_COUNT"]) + 1
            num_bytes = int(named["RAY_ROTATION_MAX_BYTES"]) * num_files
            assert 50 * num_bytes <= gibibytes(logs["emptyDir"]["sizeLimit"]) * 2**30 / 2
        (container,) = pod["containers"]
        assert gibibytes(container["resources"]["requests"]["ephemeral-storage"]) > 0


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_shared_memory_is_left_to_kuberay(overlay: str) -> None:
    """It mounts a ``/dev/shm`` as large as the container's memory where nobody else says where
    Ray's objects go."""
    for group in groups(ray_service(overlay)):
        (container,) = group["template"]["spec"]["containers"]
        assert "plasma-directory" not in group["rayStartParams"]
        assert "/dev/shm" not in [mount["mountPath"] for mount in container["volumeMounts"]]
        assert "memory" in container["resources"]["limits"]

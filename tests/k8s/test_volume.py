"""The shared volume: who may write to it, and that all mean the same place on it."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from typer.main import get_command

from hdserve.cli.commands import app as hdserve_app
from hdserve.config import ModelConfig
from hdserve.databases.snapshot import DatabaseKey
from tests.databases.test_archive import fill
from tests.k8s.manifests import (
    HELPERS,
    OVERLAYS,
    WITH_PODS,
    Manifest,
    application_config,
    environment,
    init_container,
    pod_specs,
    ray_service,
    render,
)
from tests.k8s.pods import run_as_the_pod, start_as_the_pod, worker_pods

CLAIM = "hdserve-data"
MOUNT = "/var/lib/hdserve"


def place_on_volume(pod: Manifest, path: str) -> PurePosixPath:
    """Where on the volume is what the container of ``pod`` calls ``path``."""
    names = {
        volume["name"]
        for volume in pod["volumes"]
        if volume.get("persistentVolumeClaim", {}).get("claimName") == CLAIM
    }
    (container,) = pod["containers"]
    mounts = [
        mount
        for mount in container["volumeMounts"]
        if mount["name"] in names and PurePosixPath(path).is_relative_to(mount["mountPath"])
    ]
    assert mounts, f"{path} is not on the volume"
    mount = max(mounts, key=lambda mount: len(mount["mountPath"]))
    inner = PurePosixPath(path).relative_to(mount["mountPath"])
    return PurePosixPath("/", mount.get("subPath", ""), inner)


def helper(target: str) -> Manifest:
    (pod,) = pod_specs(render(target))
    return pod


def arguments(target: str) -> dict[str, Any]:
    """Of the ``hdserve`` command of a job, as the command parses them."""
    (container,) = helper(target)["containers"]
    program, *words = container["command"] + container["args"]
    assert program == "hdserve"
    return parsed(words)


def parsed(words: list[str]) -> dict[str, Any]:
    """What ``hdserve`` makes of its arguments."""
    current: Any = get_command(hdserve_app)
    while hasattr(current, "commands"):
        current = current.commands[words.pop(0)]
    return dict(current.make_context("hdserve", words).params)


def served_model(overlay: str) -> ModelConfig:
    return application_config(ray_service(overlay)).models[0]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_directories_are_made(overlay: str, place: Path) -> None:
    """By the user who writes to them, and before Ray starts, each that is mounted by itself."""
    for number, pod in enumerate(worker_pods(overlay)):
        volume = place / str(number)
        volume.mkdir()
        os.chown(volume, pod["securityContext"]["runAsUser"], -1)
        for _ in range(2):
            result = run_as_the_pod(pod, init_container(pod, "volume"), {MOUNT: volume})
            assert result.returncode == 0, result.stderr
        mounts = pod["containers"][0]["volumeMounts"]
        wanted = {mount["subPath"] for mount in mounts if mount["name"] == "data"}
        assert {path.name for path in volume.iterdir()} == wanted


@pytest.mark.parametrize("is_made", [False, True])
def test_a_volume_of_another_user_is_told(is_made: bool, place: Path) -> None:
    """Where the driver of a volume ignores ``fsGroup`` it is root's; so may what is in it be.  The
    pod waits and says so until it is put right: KubeRay deletes one that fails, with its log."""
    pod, *_ = worker_pods("gpu")
    user = pod["securityContext"]["runAsUser"]
    if is_made:
        os.chown(place, user, -1)
        (place / "models").mkdir()
    container = copy.deepcopy(init_container(pod, "volume"))
    script, num_sleeps = re.subn(r"sleep \d+", "sleep 0.1", container["command"][-1])
    assert num_sleeps == 1
    container["command"][-1] = script
    with start_as_the_pod(pod, container, {MOUNT: place}) as process:
        assert process.stderr is not None
        told = (line for line in process.stderr if "user 10001 cannot write to" in line)
        for _ in range(3):
            assert next(told, "")
        for path in (place, *place.iterdir()):
            os.chown(path, user, -1)
        process.communicate(timeout=60.0)
    assert process.returncode == 0
    assert (place / "models").stat().st_uid == user


JOB_NAME = "metadata.labels['batch.kubernetes.io/job-name']"


@dataclass(frozen=True)
class Backup:
    """What the pod of the backup runs, with its volumes below ``place``."""

    place: Path
    script: str

    @property
    def archives(self) -> Path:
        return self.place / "backup"

    @property
    def command(self) -> list[str]:
        script = self.script.replace(snapshot_dir(), str(self.place / "database"))
        return ["bash", "-ec", script.replace("/backup", str(self.archives))]

    def environment(self, job: str, programs: Path) -> dict[str, str]:
        """With the name of a job where the pod has that of its own."""
        (container,) = helper("backup")["containers"]
        source = {"fieldRef": {"fieldPath": JOB_NAME}}
        (name,) = (item["name"] for item in container["env"] if item.get("valueFrom") == source)
        return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", name: job}

    def run(self, job: str, status: int = 0) -> list[str]:
        """A try of a job; returns the names of what there is then."""
        environment = self.environment(job, Path(sys.executable).parent)
        assert subprocess.run(self.command, check=False, env=environment).returncode == status
        return sorted(path.name for path in self.archives.iterdir())


def snapshot_dir() -> str:
    return str(application_config(ray_service("gpu")).model_database.snapshot_dir)


def backup(place: Path, model: str) -> Backup:
    """Of a database of ``model``, when there is no archive yet."""
    (place / "backup").mkdir()
    fill(place / "database", DatabaseKey(model, "f" * 32)).close()
    (container,) = helper("backup")["containers"]
    return Backup(place, container["command"][-1])


def damage(database: Path) -> None:
    (chunk, *_) = database.rglob("*.chunk")
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")


def test_the_backup_is_of_the_database_that_is_served(tmp_path: Path) -> None:
    """To a volume of its own, as often as it is asked for; archives of today stay, and nothing of
    those of two weeks ago.  Each try of a job replaces the archive of the one before."""
    own = backup(tmp_path, served_model("gpu").name)
    assert f" {snapshot_dir()} " in own.script
    with pytest.raises(AssertionError, match="is not on the volume"):
        place_on_volume(helper("backup"), "/backup")
    for name in ("new.hdb", "old.hdb", "old.hdb.unfinished"):
        (own.archives / name).touch()
        os.utime(own.archives / name, (0, 0) if name.startswith("old") else None)
    for name in ("a", "b"):
        found = own.run(name)
    first, *rest = found
    assert first == "new.hdb"
    for name, each in zip("ab", rest, strict=True):
        assert re.fullmatch(rf"qwen2\.5-7b-\d{{4}}-\d\d-\d\d-{name}\.hdb", each)
    (chunk, *_) = (tmp_path / "database").rglob("*.chunk")
    data = chunk.read_bytes()
    damage(tmp_path / "database")
    assert len(own.run("c", 1)) == len(own.run("c", 1)) == len(found) + 1
    chunk.write_bytes(data)
    assert len(own.run("c")) == len(found) + 1


def test_a_backup_that_is_cut_off_leaves_the_archive_of_the_try_before(tmp_path: Path) -> None:
    """Of a damaged database, which no try archives as a whole."""
    own = backup(tmp_path, served_model("gpu").name)
    damage(tmp_path / "database")
    (name,) = own.run("a", 1)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "hdserve").write_text("#!/bin/sh\necho started\nexec sleep 600\n")
    (programs / "hdserve").chmod(0o755)
    environment = own.environment("a", programs)
    with subprocess.Popen(
        own.command, env=environment, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        os.killpg(process.pid, signal.SIGKILL)
    assert [path.name for path in own.archives.iterdir()] == [name]


def test_a_backup_that_fails_keeps_none_of_another_model(tmp_path: Path) -> None:
    """Where the script has a line for each; names of models need not be those of files."""
    own = backup(tmp_path, "org/model")
    lines = "backup no-such-model\nbackup org/model"
    changed = re.sub(r"^backup qwen2\.5-7b$", lines, own.script, flags=re.MULTILINE)
    (name,) = Backup(tmp_path, changed).run("a", 2)
    assert re.fullmatch(r"org-model-.*-a\.hdb", name)


def test_all_pods_are_one_user() -> None:
    """Files on the volume are their owner's."""
    pods = [
        pod
        for target in WITH_PODS
        for pod in pod_specs(render(target))
        if any("persistentVolumeClaim" in volume for volume in pod.get("volumes", ()))
    ]
    assert len({tuple(sorted(_identity(pod).items())) for pod in pods}) == 1
    assert len(pods) >= len(WITH_PODS)


def _identity(pod: Manifest) -> dict[str, int]:
    names = ("runAsUser", "runAsGroup", "fsGroup")
    return {name: pod["securityContext"][name] for name in names}


@pytest.mark.parametrize("target", HELPERS)
def test_helpers_call_things_as_the_application_does(target: str) -> None:
    """So that one path is good everywhere: in the configuration, in jobs and in the guide."""
    pod = helper(target)
    for worker in worker_pods("gpu"):
        for mount in worker["containers"][0]["volumeMounts"]:
            if mount["name"] == "data":
                path = mount["mountPath"]
                assert place_on_volume(pod, path) == place_on_volume(worker, path)
    assert environment(pod["containers"][0])["HF_HOME"] == f"{MOUNT}/models"


def test_the_statistics_job_builds_what_is_served() -> None:
    found, model = arguments("statistics-job"), served_model("gpu")
    assert str(found["output"]) == model.statistics
    assert found["tokenizer"] == model.model
    assert found["inputs"] == [f"{MOUNT}/corpora"]


def test_the_database_job_fills_the_database_that_is_served() -> None:
    found, model = arguments("database-job"), served_model("gpu")
    directory = application_config(ray_service("gpu")).model_database.snapshot_dir
    assert found["root"] == directory
    assert (found["model"], found["name"]) == (model.model, model.name)
    assert place_on_volume(helper("database-job"), str(found["prompts"]))

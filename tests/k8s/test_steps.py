"""The steps of docs/kubernetes.md do what they say; ``test_code_blocks`` checks that they can be
done."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeDeploySchema

from hdserve.config.deployed import read_deployed_config
from tests.documents import shell_commands
from tests.k8s.manifests import (
    OVERLAYS,
    ROOT,
    application_config,
    containers,
    groups,
    of_kind,
    pod_specs,
    ray_service,
    render,
    serve_config,
)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_doctor_is_given_the_configuration_of_the_application(overlay: str, tmp_path: Path) -> None:
    """By the manifest alone, as the cluster gives it, and by all that was rendered."""
    service = ray_service(overlay)
    for manifests in ([service], render(f"overlays/{overlay}")):
        path = tmp_path / "manifest.yaml"
        path.write_text(yaml.safe_dump_all(manifests))
        found = read_deployed_config(path)
        assert found.config == application_config(service)
        assert found.port == serve_config(service)["http_options"]["port"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_replicas_are_full_before_a_gateway_is(overlay: str) -> None:
    """So that they refuse what is too much, even by one gateway, which has room for probes and
    metrics beside it; the pages tell the numbers.  What waits for a gateway is bounded where
    clients come from outside."""
    config = application_config(ray_service(overlay))
    assert config.gateway.max_ongoing_requests >= config.max_num_open + 100
    if overlay == "cpu-dev":
        return
    assert config.gateway.max_queued_requests is not None
    text = (ROOT / "docs" / "kubernetes-operations.md").read_text()
    assert f"{config.max_num_open:,}" in text


def test_the_volume_comes_before_the_application() -> None:
    """With the namespace, and as the overlays that many nodes serve have it: a claim cannot be
    changed when it is there."""
    assert {item["kind"] for item in render("storage")} == {"Namespace", "PersistentVolumeClaim"}
    for overlay in ("gpu", "multi-model"):
        for manifest in render("storage"):
            assert manifest in of_kind(render(f"overlays/{overlay}"), manifest["kind"])


def code_version(config: dict[str, Any]) -> str:
    """Of the application: replicas of another one are replaced."""
    return get_app_code_version(ServeDeploySchema.model_validate(config).applications[0])


def test_the_file_of_the_keys_changes_in_pods_that_run() -> None:
    """As a file of a mounted directory does, and one that is mounted by itself does not."""
    for group in groups(ray_service("multi-model")):
        (container,) = group["template"]["spec"]["containers"]
        (mount,) = (item for item in container["volumeMounts"] if item["name"] == "keys")
        assert "subPath" not in mount


def test_scaling_by_hand_replaces_nothing() -> None:
    """Beside ``args`` it does not, within it does."""
    config = serve_config(ray_service("multi-model"))
    beside, within = copy.deepcopy(config), copy.deepcopy(config)
    beside["applications"][0]["deployments"] = [{"name": "model-hdserve-tiny", "num_replicas": 3}]
    within["applications"][0]["args"]["config"]["models"][2]["num_replicas"] = 3
    assert code_version(beside) == code_version(config)
    assert code_version(within) != code_version(config)


def test_bounds_beside_the_arguments_replace_nothing() -> None:
    """Of models that scale by themselves, when they had some before: those of one more model, or
    that they are taken away, do."""

    def version(**min_replicas: int) -> str:
        config = serve_config(ray_service("multi-model"))
        deployments = config["applications"][0].setdefault("deployments", [])
        deployments += [
            {"name": f"model-qwen2.5-{size}", "autoscaling_config": {"min_replicas": number}}
            for size, number in min_replicas.items()
        ]
        return code_version(config)

    assert version(**{"7b": 1}) == version(**{"7b": 5})
    assert len({version(), version(**{"7b": 5}), version(**{"7b": 5, "1.5b": 1})}) == 3


def test_all_images_of_a_development_machine_are_named() -> None:
    """So that they can be loaded onto a node that has no way to a registry."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    images = {
        container["image"]
        for pod in pod_specs(render("overlays/cpu-dev"))
        for container in containers(pod)
    }
    assert images
    for image in images:
        assert f"kind load docker-image {image}\n" in text


def test_waits_for_jobs_end_when_they_fail() -> None:
    """A job has a condition when it has ended, one way or the other."""
    waits = [
        words
        for words in shell_commands()
        if words[0] == "kubectl" and "wait" in words and any(map(re.compile("job/").match, words))
    ]
    assert len(waits) == 2
    for words in waits:
        assert "--for=jsonpath={.status.conditions}" in words


def test_options_of_the_system_are_those_of_every_system() -> None:
    """``base64`` of macOS and BSD has no ``-w``."""
    for name in ("kubernetes.md", "kubernetes-operations.md"):
        assert not re.search(r"base64 -(w|-wrap)", (ROOT / "docs" / name).read_text())

"""The steps of docs/kubernetes.md do what they say; ``test_code_blocks`` checks that they can be
done."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeDeploySchema

from hdserve.config import parse_config
from tests.k8s.manifests import (
    OVERLAYS,
    ROOT,
    application_config,
    groups,
    of_kind,
    ray_service,
    render,
    serve_config,
)

GUIDE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_doctor_is_given_the_configuration_of_the_application(overlay: str) -> None:
    """The guide's program takes it out of what the cluster holds."""
    (program,) = re.findall(r"python -c '(.*?)'", GUIDE, re.DOTALL)
    program = re.sub(r"\n +", "\n", program)
    service = ray_service(overlay)
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=service["spec"]["serveConfigV2"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert parse_config(yaml.safe_load(result.stdout)) == application_config(service)


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

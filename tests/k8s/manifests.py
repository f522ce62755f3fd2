"""The rendered manifests, and the rules they are held against."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from hdserve.config import ServeConfig, parse_config

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("cpu-dev", "gpu", "multi-model")
HELPERS = {
    "volume": "cpu",
    "statistics-job": "cpu",
    "database-job": "cuda",
    "backup": "cpu",
}
"""What has pods of its own beside the application, and which image they run."""

WITH_PODS = (*(f"overlays/{name}" for name in OVERLAYS), *HELPERS)
TARGETS = (*WITH_PODS, "storage")
CRD = ROOT.parent / "shared" / "data" / "kuberay" / "ray.io_rayservices.yaml"

KUBERNETES_VERSION = "1.34"
BUILT_IN = re.compile(r"v1|(apps|batch|policy)/v1|networking\.k8s\.io/v1")

Manifest = dict[str, Any]


@cache
def render(target: str) -> tuple[Manifest, ...]:
    """What ``kubectl kustomize`` makes of a directory below ``k8s``."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl to render the manifests")
    command = ["kubectl", "kustomize", str(K8S / target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return tuple(yaml.load_all(result.stdout, Loader=yaml.CSafeLoader))


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def ray_service(overlay: str) -> Manifest:
    (service,) = of_kind(render(f"overlays/{overlay}"), "RayService")
    return service


def check_built_in(manifests: Iterable[Manifest]) -> None:
    """Those of a built-in kind, strictly, by the schemas of Kubernetes; there is one."""
    built_in = [item for item in manifests if BUILT_IN.fullmatch(item["apiVersion"])]
    assert built_in
    for manifest in built_in:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def check_pod_templates(service: Manifest) -> None:
    """Those of a RayService as those of a Pod, which the schema of KubeRay looks at loosely."""
    for group in groups(service):
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)


def serve_config(service: Manifest) -> Manifest:
    config: Manifest = yaml.safe_load(service["spec"]["serveConfigV2"])
    return config


def application_config(service: Manifest) -> ServeConfig:
    """The configuration of hdserve itself."""
    (application,) = serve_config(service)["applications"]
    return parse_config(application["args"]["config"])


def groups(service: Manifest) -> list[Manifest]:
    """The head group and the worker groups."""
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pod_specs(manifests: tuple[Manifest, ...]) -> list[Manifest]:
    """Of everything that starts pods."""
    found = [
        manifest["spec"]["template"]["spec"]
        for manifest in manifests
        if manifest["kind"] in ("StatefulSet", "Job")
    ]
    found += [
        manifest["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        for manifest in of_kind(manifests, "CronJob")
    ]
    found += [manifest["spec"] for manifest in of_kind(manifests, "Pod")]
    for service in of_kind(manifests, "RayService"):
        found += [group["template"]["spec"] for group in groups(service)]
    return found


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def environment(container: Manifest) -> dict[str, str]:
    """What is set to a value; not what comes from a secret."""
    return {item["name"]: item["value"] for item in container.get("env", ()) if "value" in item}


def init_container(pod: Manifest, name: str) -> Manifest:
    (found,) = (item for item in pod["initContainers"] if item["name"] == name)
    return found


@cache
def ray_service_validator() -> Draft202012Validator:
    """Checks a RayService by KubeRay's schema, and refuses unknown fields."""
    if not CRD.exists():
        pytest.skip("the KubeRay custom resource definition is not here")
    definition = yaml.load(CRD.read_text(), Loader=yaml.CSafeLoader)
    (version,) = (item for item in definition["spec"]["versions"] if item["name"] == "v1")
    schema: Manifest = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    _refuse_unknown(schema)
    return Draft202012Validator(schema)


def _refuse_unknown(schema: Any) -> None:
    if isinstance(schema, list):
        for item in schema:
            _refuse_unknown(item)
    if not isinstance(schema, dict):
        return
    is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if "properties" in schema and "additionalProperties" not in schema and not is_open:
        schema["additionalProperties"] = False
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
        schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    for value in schema.values():
        _refuse_unknown(value)


def unknown_keys(model: type[BaseModel], data: Any, where: str = "") -> list[str]:
    """Keys of ``data`` that a pydantic model passes over in silence."""
    if not isinstance(data, dict):
        return []
    fields = {**model.model_fields}
    found = [f"{where}{key}" for key in data if key not in fields]
    for name, field in fields.items():
        inner = _model_in(field.annotation)
        if inner is not None and name in data:
            values = data[name] if isinstance(data[name], list) else [data[name]]
            for value in values:
                found += unknown_keys(inner, value, f"{where}{name}.")
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(argument) for argument in getattr(annotation, "__args__", ()))
    return next((model for model in inner if model is not None), None)

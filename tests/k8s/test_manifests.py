"""The manifests are what Kubernetes, KubeRay and Ray Serve take, and what this package is."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import jsonschema
import pytest
from ray import serve
from ray.serve.schema import ServeDeploySchema

from hdserve.cli.proxy import proxy_variables
from hdserve.config import (
    ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE,
    API_KEYS_FILE_ENVIRONMENT_VARIABLE,
)
from tests.k8s.manifests import (
    HELPERS,
    K8S,
    OVERLAYS,
    ROOT,
    TARGETS,
    WITH_PODS,
    Manifest,
    check_built_in,
    check_pod_templates,
    containers,
    groups,
    of_kind,
    pod_specs,
    ray_service,
    ray_service_validator,
    render,
    serve_config,
    unknown_keys,
)
from tests.k8s.operator_rules import violations


@pytest.mark.parametrize("target", TARGETS)
def test_built_in_kinds_are_valid(target: str) -> None:
    """Each, strictly, by the schemas of Kubernetes."""
    check_built_in(render(target))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pod_templates_are_valid(overlay: str) -> None:
    """Those of the RayService as those of a Pod, which the schema of KubeRay looks at loosely."""
    check_pod_templates(ray_service(overlay))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_service_has_kuberays_schema(overlay: str) -> None:
    """And no field the schema does not know."""
    ray_service_validator().validate(ray_service(overlay))


@pytest.mark.parametrize(
    "path",
    ["spec.serveConfig", "spec.rayClusterConfig.autoscalerOptions.versoin", "spec.x"],
)
def test_unknown_fields_are_found(path: str) -> None:
    """A misspelt field is refused, or the test above could not fail."""
    service = copy.deepcopy(ray_service("gpu"))
    *parents, name = path.split(".")
    place: Any = service
    for parent in parents:
        place = place[parent]
    place[name] = "v2"
    with pytest.raises(jsonschema.ValidationError, match=name):
        ray_service_validator().validate(service)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_operator_takes_it(overlay: str) -> None:
    assert list(violations(ray_service(overlay))) == []


def _set(path: str, value: Any) -> Callable[[Manifest], None]:
    def change(service: Manifest) -> None:
        *parents, name = path.split(".")
        place: Any = service
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[name] = value

    return change


HEAD = "spec.rayClusterConfig.headGroupSpec"


@pytest.mark.parametrize(
    "change",
    [
        _set("metadata.name", "1-hdserve"),
        _set("metadata.annotations", {"ray.io/ft-enabled": "true"}),
        _set("spec.upgradeStrategy.type", "Recreate"),
        _set("spec.rayClusterConfig.rayVersion", "2.40.0"),
        _set(f"{HEAD}.headService", {"metadata": {"name": "head"}}),
        _set(f"{HEAD}.template.spec.restartPolicy", "Always"),
        _set(f"{HEAD}.rayStartParams.redis-password", "x"),
        _set(f"{HEAD}.resources", {"cpu": "1"}),
        _set(
            f"{HEAD}.template.spec.containers.0.env",
            [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}],
        ),
        _set("spec.rayClusterConfig.workerGroupSpecs.0.minReplicas", 9),
    ],
)
def test_the_operators_rules_find_mistakes(change: Callable[[Manifest], None]) -> None:
    """Each of these is refused by the operator, and by the rules here."""
    service = copy.deepcopy(ray_service("gpu"))
    change(service)
    assert list(violations(service))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_serve_config(overlay: str) -> None:
    """Ray Serve takes it, and passes over no key of it."""
    config = serve_config(ray_service(overlay))
    ServeDeploySchema.model_validate(config)
    assert unknown_keys(ServeDeploySchema, config) == []
    config["applications"][0]["num_replica"] = 3
    assert unknown_keys(ServeDeploySchema, config) == ["applications.num_replica"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_application_is_built(overlay: str) -> None:
    """The import path leads to a builder that takes the manifest's arguments."""
    (application,) = serve_config(ray_service(overlay))["applications"]
    module, _, name = application["import_path"].partition(":")
    builder = getattr(importlib.import_module(module), name)
    args = builder.__annotations__["args"].model_validate(application["args"])
    assert isinstance(builder(args), serve.Application)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_serving_stays_off_the_head(overlay: str) -> None:
    """And KubeRay finds the ports it probes and Prometheus reads."""
    service = ray_service(overlay)
    head, *workers = groups(service)
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert service["spec"]["excludeHeadPodFromServeSvc"] is True
    for group in (head, *workers):
        (container,) = group["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["serve"] == serve_config(service)["http_options"]["port"]
        assert str(ports["metrics"]) == group["rayStartParams"]["metrics-export-port"]
        assert "readinessProbe" not in container, "KubeRay's own probes would not be added"


@pytest.mark.parametrize("target", WITH_PODS)
def test_pods_are_restricted(target: str) -> None:
    """Not root, a root that cannot be written, no privileges; memory is bounded."""
    pods = pod_specs(render(target))
    assert pods
    for pod in pods:
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] >= 100
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def dangling_mounts(manifests: Iterable[Manifest]) -> Iterator[str]:
    """Volumes that a container mounts and its pod does not have, neither by itself nor by the
    ``volumeClaimTemplates`` of its StatefulSet."""
    claimed = {
        id(item["spec"]["template"]["spec"]): item["spec"]["volumeClaimTemplates"]
        for item in of_kind(tuple(manifests), "StatefulSet")
    }
    for pod in pod_specs(tuple(manifests)):
        templates = claimed.get(id(pod), [])
        volumes = {claim["metadata"]["name"] for claim in templates}
        volumes |= {volume["name"] for volume in pod.get("volumes", ())}
        for container in containers(pod):
            for mount in container.get("volumeMounts", ()):
                if mount["name"] not in volumes:
                    yield mount["name"]


@pytest.mark.parametrize("target", ["backup", "database-job", "statistics-job"])
def test_failed_jobs_keep_their_logs(target: str) -> None:
    """A pod that is restarted is deleted, with its log, when the job has failed; where each try is
    a pod, all stay."""
    jobs = [manifest["spec"] for manifest in of_kind(render(target), "Job")]
    jobs += [item["spec"]["jobTemplate"]["spec"] for item in of_kind(render(target), "CronJob")]
    (job,) = jobs
    assert job["backoffLimit"] > 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("kind", ["RayService", "StatefulSet"])
def test_dangling_mounts_are_found(kind: str) -> None:
    """Of each kind that has pods, when what it calls ``data`` is called otherwise."""
    manifests = copy.deepcopy(render("overlays/gpu"))
    for manifest in of_kind(manifests, kind):
        if kind == "StatefulSet":
            manifest["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] = "other"
        for pod in pod_specs((manifest,)):
            pod["volumes"] = [item for item in pod.get("volumes", ()) if item["name"] != "data"]
    assert set(dangling_mounts(manifests)) == {"data"}


@pytest.mark.parametrize("target", WITH_PODS)
def test_references_lead_somewhere(target: str) -> None:
    """Volumes are mounted that exist, and are claimed; only the one secret is used."""
    assert list(dangling_mounts(render(target))) == []
    manifests = (*render("storage"), *render(target))
    claims = {claim["metadata"]["name"] for claim in of_kind(manifests, "PersistentVolumeClaim")}
    for pod in pod_specs(render(target)):
        for volume in pod.get("volumes", ()):
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "secret" in volume:
                assert volume["secret"]["secretName"] == "hdserve-secrets"
        for container in containers(pod):
            for item in container.get("env", ()):
                reference = item.get("valueFrom", {}).get("secretKeyRef")
                assert reference is None or reference["name"] == "hdserve-secrets"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_keys_are_where_the_application_looks(overlay: str) -> None:
    """In every pod, because Ray Serve builds the application in any of them; none on a laptop."""
    for group in groups(ray_service(overlay)):
        pod = group["template"]["spec"]
        environment = {item["name"]: item for item in pod["containers"][0].get("env", ())}
        if overlay == "cpu-dev":
            assert API_KEYS_FILE_ENVIRONMENT_VARIABLE not in environment
            continue
        names = (API_KEYS_FILE_ENVIRONMENT_VARIABLE, ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE)
        paths = [environment[name]["value"] for name in names]
        (mount,) = (item for item in pod["containers"][0]["volumeMounts"] if item["name"] == "keys")
        (volume,) = (item for item in pod["volumes"] if item["name"] == "keys")
        items = volume["secret"]["items"]
        assert [f"{mount['mountPath']}/{item['path']}" for item in items] == paths
        assert [item["key"] for item in items] == ["api-keys", "admin-key"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_haproxy_is_in_front_of_gpus(overlay: str) -> None:
    """Of every pod: the controller on the head has to know, too.  It sees clients that hang up, as
    with ``hdserve serve``."""
    with ExitStack() as holding:
        variables = proxy_variables("127.0.0.1", 8000, ROOT, {}, holding)
    defaults = variables.get("RAY_SERVE_HAPROXY_RETRY_ON")
    for group in groups(ray_service(overlay)):
        (container,) = group["template"]["spec"]["containers"]
        environment = {item["name"]: item.get("value") for item in container["env"]}
        wanted = {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
            "RAY_SERVE_HAPROXY_RETRY_ON": defaults,
        }
        found = {name: environment[name] for name in wanted if name in environment}
        assert found == ({} if overlay == "cpu-dev" else wanted)


def test_redis_can_be_left_out() -> None:
    """Where there is a managed one: an overlay brings it as a component, the base has nothing of
    it."""
    names = {item["metadata"]["name"] for item in render("base")}
    assert "hdserve-redis" not in names
    for overlay in OVERLAYS:
        kinds = {
            item["kind"]
            for item in render(f"overlays/{overlay}")
            if item["metadata"]["name"] == "hdserve-redis"
        }
        assert kinds == {"Service", "StatefulSet", "NetworkPolicy"}


def test_selectors_match_pods() -> None:
    """Each selector matches the labels of a pod template."""
    manifests = render("overlays/gpu")
    templates = [group["template"] for group in groups(ray_service("gpu"))]
    templates += [item["spec"]["template"] for item in of_kind(manifests, "StatefulSet")]
    labels = [template["metadata"]["labels"] for template in templates]
    selectors = [
        item["spec"]["selector"]["matchLabels"]
        for kind in ("PodDisruptionBudget", "PodMonitor", "StatefulSet")
        for item in of_kind(manifests, kind)
    ]
    selectors += [
        item["spec"]["podSelector"]["matchLabels"] for item in of_kind(manifests, "NetworkPolicy")
    ]
    selectors += [item["spec"]["selector"] for item in of_kind(manifests, "Service")]
    assert len(selectors) == 6
    for selector in selectors:
        assert any(selector.items() <= found.items() for found in labels), selector


def test_versions_agree() -> None:
    """Of image, constraints, project and manifest."""
    constraints = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
    )
    project = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert found is not None
    tag = f"hdserve:{found[1]}-ray{constraints['ray']}"
    for overlay in OVERLAYS:
        service = ray_service(overlay)
        assert service["spec"]["rayClusterConfig"]["rayVersion"] == constraints["ray"]
        flavour = "cpu" if overlay == "cpu-dev" else "cuda"
        for group in groups(service):
            for container in containers(group["template"]["spec"]):
                assert container["image"] == f"{tag}-{flavour}"
    for target, flavour in HELPERS.items():
        (pod,) = pod_specs(render(target))
        assert pod["containers"][0]["image"] == f"{tag}-{flavour}"
    dockerfile = (K8S / "Dockerfile").read_text()
    assert f"-t {tag}-cpu" in dockerfile
    assert f"-t {tag}-cuda" in dockerfile

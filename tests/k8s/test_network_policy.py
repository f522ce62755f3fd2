"""Who reaches Ray, and what Ray reaches."""

from __future__ import annotations

import pytest

from tests.k8s.manifests import OVERLAYS, Manifest, groups, of_kind, ray_service, render

OPERATORS = {
    "kustomize": {
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/component": "kuberay-operator",
    },
    "helm": {
        "app.kubernetes.io/name": "kuberay-operator",
        "app.kubernetes.io/instance": "kuberay-operator",
        "app.kubernetes.io/component": "kuberay-operator",
    },
}
"""Labels of KubeRay 1.7's operator, by what installed it."""

API_SERVER_PORTS = {"managed clusters": 443, "kubeadm, kind, k3s": 6443, "minikube": 8443}


def ray_policy(overlay: str) -> Manifest:
    (policy,) = (
        item["spec"]
        for item in of_kind(render(f"overlays/{overlay}"), "NetworkPolicy")
        if item["metadata"]["name"] == "hdserve-ray"
    )
    return policy


def ports_open_to(policy: Manifest, namespace: str, labels: dict[str, str]) -> set[int | None]:
    """To a pod of ``namespace`` with ``labels``; ``None`` stands for all."""
    found: set[int | None] = set()
    for rule in policy["ingress"]:
        for peer in rule["from"]:
            is_near = "namespaceSelector" in peer or namespace == "hdserve"
            wanted = peer.get("podSelector", {}).get("matchLabels", {})
            if is_near and wanted.items() <= labels.items():
                found |= {port["port"] for port in rule["ports"]} if "ports" in rule else {None}
    return found


@pytest.mark.parametrize("installer", OPERATORS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_operator_reaches_the_dashboard(overlay: str, installer: str) -> None:
    """Else no configuration is ever deployed."""
    policy = ray_policy(overlay)
    assert ports_open_to(policy, "ray-system", OPERATORS[installer]) == {8000, 8265}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_others_reach_the_gateway_alone(overlay: str) -> None:
    """Ray executes what comes to its other ports."""
    policy = ray_policy(overlay)
    assert ports_open_to(policy, "default", {"app": "hdserve"}) == {8000}
    assert ports_open_to(policy, "hdserve", {"app": "other"}) == {8000}
    for group in groups(ray_service(overlay)):
        labels = group["template"]["metadata"]["labels"]
        assert None in ports_open_to(policy, "hdserve", labels)


@pytest.mark.parametrize("port", [53, 5353])
@pytest.mark.parametrize("protocol", ["UDP", "TCP"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_are_found(overlay: str, protocol: str, port: int) -> None:
    """Wherever the name server is: on the node with NodeLocal DNSCache, at 5353 on OpenShift."""
    to_all = [rule for rule in ray_policy(overlay)["egress"] if "to" not in rule]
    ports = [
        (item.get("protocol", "TCP"), item["port"]) for rule in to_all for item in rule["ports"]
    ]
    assert (protocol, port) in ports


@pytest.mark.parametrize("cluster", API_SERVER_PORTS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_autoscaler_reaches_the_api_server(overlay: str, cluster: str) -> None:
    """It is in no namespace that a selector could name."""
    to_all = [rule for rule in ray_policy(overlay)["egress"] if "to" not in rule]
    ports = {port["port"] for rule in to_all for port in rule["ports"]}
    assert API_SERVER_PORTS[cluster] in ports

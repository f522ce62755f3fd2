"""What the dashboard and the alert rules ask Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from deployments.metrics.catalogue import METRICS, MetricInfo
from tests.k8s.manifests import K8S

_NAME = re.compile(r"\b(?:vllm:|hdserve_)\w+")
OF_KUBERNETES = {
    "kube_pod_status_ready": {"namespace", "pod", "condition"},
    "kube_pod_created": {"namespace", "pod"},
    "kube_pod_status_phase": {"namespace", "pod", "phase"},
    "kube_pod_container_status_restarts_total": {"namespace", "pod", "container"},
    "kube_cronjob_created": {"cronjob", "namespace"},
    "kube_cronjob_status_last_successful_time": {"cronjob", "namespace"},
    "kube_statefulset_status_replicas_ready": {"namespace", "statefulset"},
    "kubelet_volume_stats_available_bytes": {"namespace", "persistentvolumeclaim"},
    "kubelet_volume_stats_capacity_bytes": {"namespace", "persistentvolumeclaim"},
}
"""Series of kube-state-metrics and of the kubelets, and the labels they have."""

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def dashboard() -> Any:
    return json.loads((K8S / "monitoring" / "dashboard.json").read_text())


def rules() -> list[dict[str, Any]]:
    manifest = yaml.safe_load((K8S / "monitoring" / "alerts.yaml").read_text())
    return [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Where it stands, and the PromQL with Grafana's variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "5m").replace("$model_name", ".*")
            yield panel["title"], text
    for rule in rules():
        yield rule["alert"], rule["expr"]


def series_named() -> set[str]:
    """Names of series, as they stand in the expressions."""
    return {name for _, text in expressions() for name in _NAME.findall(text)}


def metric_of(series: str) -> MetricInfo | None:
    """The metric a series belongs to; the suffix must be that of its kind."""
    for info in METRICS.values():
        if series in {info.name + suffix for suffix in _SUFFIXES[info.kind]}:
            return info
    return None

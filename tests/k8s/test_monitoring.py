"""Dashboard and alert rules ask for what there is, and leave nothing out."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

from deployments.gateway import Gateway
from deployments.http.metrics import HttpMetrics, known_answers
from deployments.http.routes import build_api
from deployments.metrics.catalogue import LAST_POSITION, METRICS
from deployments.metrics.samples import Report, Sample
from deployments.metrics.text import render as metrics_text
from hdserve.config import default_config
from tests.k8s.manifests import (
    OVERLAYS,
    application_config,
    groups,
    of_kind,
    ray_service,
    render,
)
from tests.k8s.monitoring import (
    OF_KUBERNETES,
    dashboard,
    expressions,
    metric_of,
    rules,
    series_named,
)

OWN_LABELS = {"le", "job"}


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_are_promql(where: str, expression: str) -> None:
    """They parse, and select and group by labels that the metrics in them have."""
    promql_parser.parse(expression)
    labels = set(OWN_LABELS)
    for name in re.findall(r"\b(?:vllm:|hdserve_)\w+", expression):
        info = metric_of(name)
        assert info is not None, f"{where}: there is no series {name}"
        labels |= {*info.owner_labels, *info.labels}
    for name in re.findall(r"\bkube\w+", expression):
        assert name in OF_KUBERNETES, f"{where}: {name}"
        labels |= OF_KUBERNETES[name]
    used = re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", expression)
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        used += [label.strip() for label in group.split(",")]
    assert set(used) <= labels, where


def test_no_share_is_of_the_last_position() -> None:
    """Which counts all that is deeper, so that it may be more than all drafts."""
    shares = [(where, text) for where, text in expressions() if "_per_pos" in text and "/" in text]
    assert shares
    for where, text in shares:
        for matchers in re.findall(r"_per_pos_total(?:\{([^}]*)\})?", text):
            assert re.findall(r"position!=\"(\d+)\"", matchers) == [str(LAST_POSITION)], where


def test_nothing_is_left_out() -> None:
    """Every metric of the catalogue is on the dashboard or in a rule."""
    named = {info.name for info in map(metric_of, series_named()) if info is not None}
    assert named == METRICS.keys()


def unread(board: Any) -> list[str]:
    """Where ``board`` has what Grafana's own types of a dashboard do not."""
    register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
    return list(differences(board, read))


def differences(given: Any, read: Any, where: str = "") -> Iterator[str]:
    """What is in ``given`` and not so in ``read``, which may have more."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            yield from differences(value, read.get(key), f"{where}.{key}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for index, pair in enumerate(zip(given, read, strict=True)):
            yield from differences(*pair, f"{where}[{index}]")
    elif given != read:
        yield where


def test_grafana_reads_all_of_the_dashboard() -> None:
    """Each key is one of Grafana's, and each unit."""
    board = dashboard()
    assert unread(board) == []
    known = {value for value in vars(units).values() if isinstance(value, str)}
    drawn = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in drawn} <= known


@pytest.mark.parametrize(
    "path", ["refesh", "panels.1.gridPos.hight", "panels.1.targets.0.exp", "panels.1.options.tips"]
)
def test_a_misspelt_key_of_the_dashboard_is_found(path: str) -> None:
    """Or the test above could not fail."""
    board = dashboard()
    *parents, name = path.split(".")
    place = board
    for parent in parents:
        place = place[int(parent) if parent.isdigit() else parent]
    place[name] = 1
    assert [found.rpartition(".")[2] for found in unread(board)] == [name]


def test_panels_are_whole() -> None:
    """They have what Grafana draws them from, within its columns; no two overlap."""
    board = dashboard()
    assert board["uid"] == "hdserve"
    assert board["schemaVersion"] >= 39
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in {"row", "timeseries"}
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        own = {
            (column, line)
            for column in range(place["x"], place["x"] + place["w"])
            for line in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & own, panel["title"]
        cells |= own
        if panel["type"] != "row":
            targets = panel["targets"]
            assert targets
            for item in (panel, *targets):
                assert item["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert len({target["refId"] for target in targets}) == len(targets)
    assert {variable["name"] for variable in board["templating"]["list"]} == {
        "datasource",
        "model_name",
    }


def test_rules_say_what_to_do() -> None:
    """Each alert has a severity, a time, and two sentences; names are unique."""
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}
        assert re.fullmatch(r"\d+[mh]", rule["for"])


def test_shares_are_of_requests_of_clients() -> None:
    """Refusals are counted against every route that generates; errors against all routes but those
    of probes and Prometheus: 503 of ``/ready`` while a model loads is no failure."""
    routes = {route for route, _ in known_answers(build_api(Gateway(default_config(), {})))}
    generating = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
    probed = {"/ready", "/health", "/metrics"}
    assert generating | probed <= routes
    expressions = {rule["alert"]: rule["expr"] for rule in rules()}
    for alert, wanted in (("HdserveOverloaded", generating), ("HdserveErrors", routes - probed)):
        matchers = re.findall(r'route([=!])~"([^"]*)"', expressions[alert])
        assert len(matchers) == 2, "one a side"
        for sign, pattern in matchers:
            matched = {route for route in routes if re.fullmatch(pattern, route)}
            assert (matched if sign == "=" else routes - matched) == wanted, alert


def test_streams_that_fail_are_errors() -> None:
    """Of each route that has any, under whatever status they began."""
    (rule,) = (rule for rule in rules() if rule["alert"] == "HdserveErrors")
    failures, _, _ = rule["expr"].partition("/ sum")
    assert "or rate(hdserve_stream_errors_total[5m])" in failures


def test_a_full_cache_is_in_use() -> None:
    """In an almost empty one, sequences wait for another one that computes their prompt."""
    (rule,) = (rule for rule in rules() if rule["alert"] == "HdserveKvCacheFull")
    *_, usage = rule["expr"].split("\nand ")
    assert usage.strip() == "max by (model_name, engine) (vllm:kv_cache_usage_perc) > 0.5"


def series_of(replicas: dict[str, list[Report]], models: list[str]) -> defaultdict[str, set[str]]:
    """The models of each series that a gateway shows which has answered nothing yet.

    Args:
        replicas: what those of each model report.
        models: those of the configuration.
    """
    text = metrics_text(replicas, [Report("g", HttpMetrics(models).samples())]).decode()
    found: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name].add(sample.labels.get("model_name", ""))
    return found


def test_models_that_all_sleep_are_no_failure() -> None:
    """They may scale to 0: what nobody must miss, gateways show from their start."""
    (rule,) = (rule for rule in rules() if rule["alert"] == "HdserveDown")
    (name,) = re.findall(r"^absent\((\w+)\)$", rule["expr"])
    assert name in series_of({}, ["asleep"])


def test_a_model_without_replicas_is_missed() -> None:
    """Gateways count for every model of the configuration, replicas report for their own."""
    (rule,) = (rule for rule in rules() if rule["alert"] == "HdserveModelDown")
    present, absent = re.findall(r"count by \(model_name\) \((\w+)\)", rule["expr"])
    assert f") unless count by (model_name) ({absent})" in rule["expr"]
    replica = Report("r", (Sample("hdserve_slots", 16.0),))
    models = series_of({"here": [replica]}, ["here", "gone"])
    assert models[present] - models[absent] == {"gone"}


def test_pods_and_volumes_are_those_of_the_overlays() -> None:
    """Namespace and names in the rules are what the operator and Kubernetes make of the manifests'
    names."""
    (service,) = of_kind(render("overlays/gpu"), "RayService")
    (redis,) = of_kind(render("overlays/gpu"), "StatefulSet")
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    found = {rule["alert"]: rule["expr"] for rule in rules() if "kube" in rule["expr"]}
    for expression in found.values():
        assert set(re.findall(r'namespace="([^"]*)"', expression)) == {namespace}
    (head,) = re.findall(r'pod=~"([^"]*)"', found["HdserveHeadDown"])
    assert re.fullmatch(head, f"{name}-x7k2p-head-9qw4z")
    assert not re.fullmatch(head, f"{name}-x7k2p-h100-worker-9qw4z")
    (statefulset,) = re.findall(r'statefulset="([^"]*)"', found["HdserveRedisDown"])
    assert statefulset == redis["metadata"]["name"]
    (backup,) = of_kind(render("backup"), "CronJob")
    cronjobs = set(re.findall(r'cronjob="([^"]*)"', found["HdserveBackupOld"]))
    assert cronjobs == {backup["metadata"]["name"]}
    assert namespace == backup["metadata"]["namespace"]


def test_a_backup_that_never_succeeded_is_old() -> None:
    """There is no time of its last success; then the time it was created counts."""
    (rule,) = (rule for rule in rules() if rule["alert"] == "HdserveBackupOld")
    success, created = re.findall(r"kube_cronjob_\w+", rule["expr"])
    assert (success, created) == (
        "kube_cronjob_status_last_successful_time",
        "kube_cronjob_created",
    )
    assert re.search(rf"\({success}{{[^}}]*}} or {created}{{[^}}]*}}\)", rule["expr"])


def test_pods_that_are_replaced_are_missed() -> None:
    """Those of Ray alone, which are never restarted.  What the autoscaler takes away has been there
    for longer than what counts, and a cluster that goes right after its start has fewer pods."""
    (rule,) = (rule for rule in rules() if rule["alert"] == "HdservePodsReplaced")
    (pattern,) = set(re.findall(r'pod=~"([^"]*)"', rule["expr"]))
    for pod in ("head-9qw4z", "cpu-worker-9qw4z", "h100-worker-9qw4z"):
        assert re.fullmatch(pattern, f"hdserve-x7k2p-{pod}")
    for pod in ("hdserve-redis-0", "hdserve-backup-29384-x7k2p", "hdserve-volume"):
        assert not re.fullmatch(pattern, pod)
    (lifetime_s,) = map(int, re.findall(r"< (\d+)", rule["expr"]))
    (most,) = map(int, re.findall(r"> (\d+)", rule["expr"]))
    for overlay in OVERLAYS:
        service = ray_service(overlay)
        cluster = service["spec"]["rayClusterConfig"]
        idle_s = cluster["autoscalerOptions"]["idleTimeoutSeconds"]
        for model in application_config(service).models:
            if model.autoscaling is not None:
                assert lifetime_s <= model.autoscaling.downscale_delay_s + idle_s
        _, *workers = groups(service)
        assert 1 + sum(group["minReplicas"] for group in workers) <= most


def test_the_service_is_scraped_once() -> None:
    """At the name that KubeRay gives the service of the application."""
    (scrape,) = of_kind(render("overlays/gpu"), "ScrapeConfig")
    (service,) = of_kind(render("overlays/gpu"), "RayService")
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    (targets,) = scrape["spec"]["staticConfigs"]
    assert targets["targets"] == [f"{name}-serve-svc.{namespace}.svc:8000"]
    (config,) = of_kind(render("overlays/gpu"), "ConfigMap")
    assert config["metadata"]["namespace"] == namespace
    assert set(config["data"]) == {"hdserve.json"}

"""Dashboard and alert rules ask for what there is, and leave nothing out."""

from __future__ import annotations

import re

import promql_parser
import pytest

from deployments.gateway import Gateway
from deployments.http_metrics import known_answers
from deployments.metrics import METRICS
from deployments.routes import build_api
from hdserve.config import default_config
from tests.k8s.manifests import of_kind, render
from tests.k8s.monitoring import dashboard, expressions, metric_of, rules, series_named

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
    used = re.findall(r"(\w+)\s*=~?\s*\"", expression)
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        used += [label.strip() for label in group.split(",")]
    assert set(used) <= labels, where


def test_nothing_is_left_out() -> None:
    """Every metric of the catalogue is on the dashboard or in a rule."""
    named = {info.name for info in map(metric_of, series_named()) if info is not None}
    assert named == METRICS.keys()


def test_dashboard_can_be_loaded() -> None:
    """What Grafana needs of each panel is there, and no two panels overlap."""
    board = dashboard()
    assert board["uid"] == "hdserve"
    assert board["schemaVersion"] >= 39
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (column, line)
            for column in range(place["x"], place["x"] + place["w"])
            for line in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & own, panel["title"]
        cells |= own
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
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
    generating = {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
    probed = {"/ready", "/health", "/metrics"}
    assert generating | probed <= routes
    expressions = {rule["alert"]: rule["expr"] for rule in rules()}
    for alert, wanted in (("HdserveOverloaded", generating), ("HdserveErrors", routes - probed)):
        matchers = re.findall(r'route([=!])~"([^"]*)"', expressions[alert])
        assert len(matchers) == 2, "one a side"
        for sign, pattern in matchers:
            matched = {route for route in routes if re.fullmatch(pattern, route)}
            assert (matched if sign == "=" else routes - matched) == wanted, alert


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

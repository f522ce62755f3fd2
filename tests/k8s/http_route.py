"""What the route of docs/kubernetes.md passes from outside, and to whom."""

from __future__ import annotations

import re
from typing import Any, Final

from deployments.gateway import Gateway
from deployments.http.routes import build_api
from hdserve.config import default_config
from tests.k8s.manifests import Manifest, ray_service, serve_config

_MAX_MATCHES: Final = 8
_KEYS: Final = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"parentRefs", "hostnames", "rules"},
    "spec.parentRefs": {"group", "kind", "namespace", "name", "sectionName", "port"},
    "spec.rules": {"name", "matches", "filters", "backendRefs", "timeouts"},
    "spec.rules.matches": {"path", "headers", "queryParams", "method"},
    "spec.rules.matches.path": {"type", "value"},
    "spec.rules.timeouts": {"request", "backendRequest"},
    "spec.rules.backendRefs": {"group", "kind", "name", "namespace", "port", "weight", "filters"},
}
"""Those of an HTTPRoute of Gateway API 1.4, by where they stand."""

_DURATION = re.compile(r"([0-9]{1,5}(h|m|s|ms)){1,4}")
CLOSED: Final = ("/v1/speculation", "/metrics", "/health", "/ready", "/version")
PAGE: Final = ("/", "/page/page.js")


def check_http_route(route: Manifest) -> None:
    """It has no key that the Gateway API does not know; what it passes is the API for clients and
    the page, all of these and nothing else; and it goes to the service of the manifests."""
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert unknown_route_keys(route) == []
    service = ray_service("gpu")
    assert route["metadata"]["namespace"] == service["metadata"]["namespace"]
    backend = {
        "name": f"{service['metadata']['name']}-serve-svc",
        "port": serve_config(service)["http_options"]["port"],
    }
    for rule in route["spec"]["rules"]:
        assert len(rule["matches"]) <= _MAX_MATCHES
        assert _DURATION.fullmatch(rule["timeouts"]["request"])
        assert rule["backendRefs"] == [backend]
    paths = [*build_api(Gateway(default_config(), {})).openapi()["paths"], *PAGE]
    assert {path for path in paths if not passes(route, path)} == {
        path for path in paths if path.startswith(CLOSED)
    }
    for match in _matches(route):
        assert any(_takes(match, path) for path in paths), match


def passes(route: Manifest, path: str) -> bool:
    """Whether a request for ``path`` goes through."""
    return any(_takes(match, path) for match in _matches(route))


def unknown_route_keys(value: Any, where: str = "") -> list[str]:
    """Keys that an HTTPRoute does not have there."""
    if isinstance(value, list):
        return [key for item in value for key in unknown_route_keys(item, where)]
    if not isinstance(value, dict) or where not in _KEYS:
        return []
    inner = {name: f"{where}.{name}".lstrip(".") for name in value}
    found = [place for name, place in inner.items() if name not in _KEYS[where]]
    return found + [
        key for name, place in inner.items() for key in unknown_route_keys(value[name], place)
    ]


def _matches(route: Manifest) -> list[Manifest]:
    return [match["path"] for rule in route["spec"]["rules"] for match in rule["matches"]]


def _takes(match: Manifest, path: str) -> bool:
    """As the Gateway API defines it: a prefix is one of whole elements of the path."""
    if match["type"] == "Exact":
        return path == str(match["value"])
    assert match["type"] == "PathPrefix"
    prefix = match["value"].rstrip("/")
    return path == prefix or path.startswith(f"{prefix}/")

"""The route that is shown passes what it should: a mistake in it would be found."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import yaml

from tests.documents import ROOT, blocks
from tests.k8s.http_route import check_http_route, passes
from tests.k8s.manifests import Manifest


@pytest.fixture
def route() -> Manifest:
    """The one of docs/kubernetes.md."""
    texts = [text for _, text in blocks(ROOT / "docs" / "kubernetes.md") if "HTTPRoute" in text]
    (text,) = texts
    found: Manifest = yaml.safe_load(text)
    return found


def test_the_route_is_right(route: Manifest) -> None:
    """The administration stays inside, whatever follows its path."""
    check_http_route(route)
    assert passes(route, "/v1/models/owner/name")
    assert not passes(route, "/v1/speculation/databases/a/export")
    assert not passes(route, "/v1/chatter")


def _rule(name: str, value: object) -> Callable[[Manifest], None]:
    return lambda route: route["spec"]["rules"][0].update({name: value})


def _path(value: str) -> Callable[[Manifest], None]:
    match = {"path": {"type": "PathPrefix", "value": value}}
    return lambda route: route["spec"]["rules"].append(
        {**route["spec"]["rules"][0], "matches": [match]}
    )


@pytest.mark.parametrize(
    "change",
    [
        _path("/v1"),
        _path("/v1/speculation"),
        _path("/metrics"),
        _path("/v1/embeddings"),
        lambda route: route["spec"]["rules"][0]["matches"].pop(0),
        _rule("timeouts", {"request": "600"}),
        _rule("timeout", {"request": "600s"}),
        _rule("backendRefs", [{"name": "hdserve-head-svc", "port": 8000}]),
        _rule("backendRefs", [{"name": "hdserve-serve-svc", "port": 80}]),
        lambda route: route["metadata"].update({"namespace": "default"}),
    ],
)
def test_a_mistake_is_found(route: Manifest, change: Callable[[Manifest], None]) -> None:
    """Each of these would open what is closed, close what is open, or lead elsewhere."""
    wrong = copy.deepcopy(route)
    change(wrong)
    with pytest.raises(AssertionError):
        check_http_route(wrong)

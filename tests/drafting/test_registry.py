"""Drafters by name: built from configuration, refused with the known names."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from hdserve.config import DrafterConfig, DraftingConfig
from hdserve.drafting import registry
from hdserve.drafting.registry import DRAFTERS, build_drafters
from hdserve.errors import ConfigError
from tests.drafting.helpers import (
    check_tree,
    generate,
    make_resources,
    make_sequence,
)

TEXT = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4] * 3


def _config(*names: str, **options: object) -> DraftingConfig:
    drafters = tuple(DrafterConfig(name=name, options=dict(options)) for name in names)
    return DraftingConfig(drafters=drafters)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_fills_valid_trees(name: str) -> None:
    resources = make_resources(TEXT, statistics=[TEXT])
    (drafter,) = build_drafters(_config(name), resources)
    assert drafter.name == name
    drafter.warm_up()
    trees = generate(drafter, make_sequence(TEXT), TEXT)
    for tree in trees:
        check_tree(tree)
    needs_forwards = name == "recycled"
    assert (len(trees) < len(TEXT)) != needs_forwards


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_needs_databases(name: str) -> None:
    from hdserve.drafting.base import DraftResources

    (drafter,) = build_drafters(_config(name), DraftResources(vocab_size=500))
    for tree in generate(drafter, make_sequence([1]), TEXT):
        check_tree(tree)


def test_unknown_drafter_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown drafter 'heirarchy'.*hierarchy.*prompt-lookup"):
        build_drafters(_config("heirarchy"), make_resources())


def test_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"hierarchy: min_scor: unknown key.*'min_score'"):
        build_drafters(_config("hierarchy", min_scor=0.1), make_resources())


def test_wrong_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_score"):
        build_drafters(_config("hierarchy", min_score=2), make_resources())


def test_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        DRAFTERS["mine"] = DRAFTERS["hierarchy"]  # type: ignore[index]


def _entry_points(value: str) -> EntryPoints:
    return EntryPoints([EntryPoint("mine", value, registry.ENTRY_POINT_GROUP)])


def test_entry_points_add_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter of another package is found by the name of its entry point."""
    points = _entry_points("tests.drafters:JunkDrafter")
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    known = registry.known_drafters()
    assert set(known) == {*DRAFTERS, "mine"}


@pytest.mark.parametrize("value", ["tests.nowhere:Nothing", "tests.drafting.helpers:VOCAB_SIZE"])
def test_broken_entry_points_are_reported(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: _entry_points(value))
    with pytest.raises(ConfigError, match="mine"):
        build_drafters(_config("hierarchy"), make_resources())

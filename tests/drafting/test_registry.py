"""Drafters by name: built from configuration, refused with the known names."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest
from pydantic import Field

from hdserve.config import DrafterConfig, DraftingConfig
from hdserve.config.strict_model import StrictModel
from hdserve.databases.output_log import MAX_CALIBRATION_BYTES, OutputLog
from hdserve.drafting import registry
from hdserve.drafting.base import DraftResources
from hdserve.drafting.calibration import Calibration
from hdserve.drafting.guarded import GuardedDrafters
from hdserve.drafting.registry import DRAFTERS, build_drafters, merge_drafter_states
from hdserve.drafting.states import MAX_STATES_BYTES, pack_states, unpack_states
from hdserve.errors import ConfigError
from tests.drafting.helpers import (
    check_tree,
    generate,
    make_resources,
    make_sequence,
)

TEXT = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4] * 3


@pytest.fixture(autouse=True)
def looked_up_anew() -> Iterator[None]:
    """No test finds the drafters that were installed for another."""
    registry.installed_drafters.cache_clear()
    yield
    registry.installed_drafters.cache_clear()


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
    assert len(trees) < len(TEXT)


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_needs_databases(name: str) -> None:
    (drafter,) = build_drafters(_config(name), DraftResources(vocab_size=500))
    for tree in generate(drafter, make_sequence([1]), TEXT):
        check_tree(tree)


def test_unknown_drafter_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown drafter 'heirarchy'.*hierarchy.*prompt-lookup"):
        build_drafters(_config("heirarchy"), make_resources())


def test_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"hierarchy: min_scor: unknown key.*'min_score'"):
        build_drafters(_config("hierarchy", min_scor=0.1), make_resources())


class NoOptions(StrictModel):
    pass


def test_an_option_of_a_drafter_without_any_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DRAFTERS["prompt-lookup"], "options_model", NoOptions)
    with pytest.raises(ConfigError, match="prompt-lookup: min_score: unknown key; there are none"):
        build_drafters(_config("prompt-lookup", min_score=0.1), make_resources())


def test_wrong_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_score"):
        build_drafters(_config("hierarchy", min_score=2), make_resources())


class LongOptions(StrictModel):
    word: str = Field("abc", min_length=3)
    places: list[int] = Field([1, 2], min_length=2)


@pytest.mark.parametrize(("name", "value"), [("word", "ab"), ("places", [1])])
def test_what_is_too_short_need_not_be_empty(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DRAFTERS["prompt-lookup"], "options_model", LongOptions)
    with pytest.raises(ConfigError, match=rf"{name}: .* should have at least \d "):
        build_drafters(_config("prompt-lookup", **{name: value}), make_resources())


def test_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        DRAFTERS["mine"] = DRAFTERS["hierarchy"]  # type: ignore[index]


def _entry_points(value: str) -> EntryPoints:
    return EntryPoints([EntryPoint("mine", value, registry.ENTRY_POINT_GROUP)])


def test_entry_points_add_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter of another package is found by the name of its entry point."""
    points = _entry_points("tests.drafters:UnmergedDrafter")
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    known = registry.known_drafters()
    assert set(known) == {*DRAFTERS, "mine"}


@pytest.mark.parametrize(
    "value",
    [
        "tests.nowhere:Nothing",
        "tests.drafting.helpers:VOCAB_SIZE",
        "tests.drafters:JunkDrafter",  # of another name
        "hdserve.drafting.base:Drafter",  # of none
    ],
)
def test_broken_entry_points_are_reported(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """To those who name them: all others can do without."""
    monkeypatch.setattr(registry, "entry_points", lambda group: _entry_points(value))
    with pytest.raises(ConfigError, match=f"the drafter mine .{value}"):
        build_drafters(_config("hierarchy", "mine"), make_resources())
    with pytest.raises(ConfigError, match="unknown drafter 'min'; known drafters: hierarchy"):
        build_drafters(_config("min"), make_resources())
    build_drafters(_config("hierarchy"), make_resources())


def test_a_drafter_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a traceback alone, in which its name is nowhere."""
    points = _entry_points("tests.drafters:UnmadeDrafter")
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    with pytest.raises(ConfigError, match="the drafter mine cannot be built: TypeError"):
        build_drafters(_config("mine"), make_resources())


@pytest.mark.parametrize("drafter", ["UnmergedDrafter", "MislaidDrafter"])
def test_a_drafter_that_cannot_merge_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Its newer state is kept, as if it merged none, and what they have learned is merged."""
    points = _entry_points(f"tests.drafters:{drafter}")
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    one, other = (Calibration.prior(100) for _ in range(2))
    one.count_tokens(1000)
    other.count_tokens(2000)
    messages = [
        pack_states({"hierarchy": each.to_bytes(), "mine": name})
        for each, name in ((one, b"kept"), (other, b"new"))
    ]
    merged = unpack_states(merge_drafter_states(*messages))
    assert merged["mine"] == b"new"
    assert Calibration.from_bytes(merged["hierarchy"]).num_tokens == 3000


def test_what_is_installed_is_looked_up_once_for_all_merges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes milliseconds, of the only thread of an actor."""
    asked: list[str] = []

    def entry_points(group: str) -> EntryPoints:
        asked.append(group)
        return _entry_points("tests.drafters:UnmergedDrafter")

    monkeypatch.setattr(registry, "entry_points", entry_points)
    for number in range(3):
        states = [pack_states({"mine": bytes([number, each])}) for each in (1, 2)]
        assert unpack_states(merge_drafter_states(*states)) == {"mine": bytes([number, 2])}
    assert asked == [registry.ENTRY_POINT_GROUP]


@pytest.mark.parametrize("drafter", ["UnshrunkDrafter", "MislaidDrafter"])
@pytest.mark.parametrize("num_bytes", [MAX_CALIBRATION_BYTES // 2, MAX_CALIBRATION_BYTES])
def test_a_drafter_that_cannot_shrink_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, drafter: str
) -> None:
    """What it has learned is kept where there is room for it, and theirs is merged."""
    points = _entry_points(f"tests.drafters:{drafter}")
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    one, other = _learned(0), _learned(1)
    messages = [
        pack_states({"hierarchy": each.to_bytes(), "mine": bytes(num_bytes)})
        for each in (one, other)
    ]
    merged = unpack_states(merge_drafter_states(*messages))
    assert Calibration.from_bytes(merged["hierarchy"]).num_tokens == 10_000
    assert ("mine" in merged) == (num_bytes < MAX_CALIBRATION_BYTES)


LARGE_VOCAB_SIZE = 32_000


def _learned(seed: int) -> Calibration:
    """With a bias of every token, so that its state is as large as one may be."""
    calibration = Calibration.prior(LARGE_VOCAB_SIZE)
    calibration.token_bias[:] = np.random.default_rng(seed).normal(0, 0.5, LARGE_VOCAB_SIZE)
    calibration.count_tokens(5000)
    return calibration


def _states(*names: str) -> bytes | None:
    """What a replica with such drafters shares."""
    resources = DraftResources(vocab_size=LARGE_VOCAB_SIZE)
    drafters = GuardedDrafters(build_drafters(_config(*names), resources), LARGE_VOCAB_SIZE)
    for seed, name in enumerate(names):
        drafters.adopt("n", pack_states({name: _learned(seed).to_bytes()}))
    for drafter in drafters._drafters:
        drafter.calibration("n").count_tokens(5000)  # type: ignore[attr-defined]
    states = drafters.states("n")
    assert not drafters.num_failures
    return states


@pytest.fixture
def with_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """``mine`` is another drafter with a calibration."""
    points = _entry_points("tests.drafters:SecondHierarchy")
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


@pytest.mark.usefixtures("with_a_second")
def test_the_states_of_several_drafters_share_a_message() -> None:
    states, again = _states("hierarchy", "mine"), _states("hierarchy", "mine")
    assert states is not None
    assert again is not None
    for message in (states, merge_drafter_states(states, again)):
        assert len(message) <= MAX_CALIBRATION_BYTES
        for state in unpack_states(message).values():
            calibration = Calibration.from_bytes(state)
            assert calibration.num_tokens >= 10_000
            assert np.count_nonzero(calibration.token_bias) > 1000


@pytest.mark.usefixtures("with_a_second")
def test_other_drafters_go_on_sharing_what_they_learn() -> None:
    """The state of one that is no longer configured is kept only where there is room for it."""
    log = OutputLog(1 << 20, 1 << 20, merge_calibration=merge_drafter_states)
    for seed in range(2):
        log.set_calibration("n", pack_states({"mine": _learned(seed).to_bytes()}))
    one = pack_states({"hierarchy": _learned(2).to_bytes()})
    assert len(one) > MAX_STATES_BYTES * 3 // 4
    log.set_calibration("n", one)
    assert log.partition("n").calibration == one
    small = pack_states({"other": b"learned"})
    log.set_calibration("n", small)
    assert unpack_states(log.partition("n").calibration).keys() == {"other", "hierarchy"}

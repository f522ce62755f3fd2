"""Which drafters there are, and how a configuration becomes drafters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from hdserve.config import DrafterConfig, DraftingConfig
from hdserve.config.mistakes import describe_errors
from hdserve.drafting.base import Drafter, DraftResources
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.drafting.hierarchy_paper import HierarchyPaper
from hdserve.drafting.prompt_lookup import PromptLookup
from hdserve.drafting.states import (
    as_state,
    fit_states,
    fitting_states,
    pack_states,
    unpack_states,
)
from hdserve.errors import ConfigError, HdserveError, SnapshotError

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "hdserve.drafters"

DRAFTERS: Mapping[str, type[Drafter]] = MappingProxyType(
    {
        Hierarchy.name: Hierarchy,
        PromptLookup.name: PromptLookup,
        HierarchyPaper.name: HierarchyPaper,
    }
)
"""The drafters of this package; others come from the entry points ``hdserve.drafters``."""


def known_drafters() -> dict[str, type[Drafter]]:
    """All drafters by name; those of this package cannot be replaced.  An entry point that is wrong
    is logged, and is an error only where it is named: it is in a package that others may have
    installed."""
    known: dict[str, type[Drafter]] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            known[entry.name] = _loaded(entry)
        except ConfigError as error:
            _warn(error.message)
    return known | dict(DRAFTERS)


def check_installed(name: str) -> None:
    """Check the entry points of a drafter that is not among the known ones, if it has any.

    Raises:
        ConfigError: one is wrong.
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            _loaded(entry)


def _loaded(entry: EntryPoint) -> type[Drafter]:
    """
    Raises:
        ConfigError: it cannot be loaded, is not a drafter, or is named differently from its
            drafter, so that its states would not be found.
    """
    told = f"the drafter {entry.name} ({entry.value}, of {_package(entry)})"
    try:
        drafter = entry.load()
    except Exception as error:
        raise ConfigError(f"{told} fails: {error}") from error
    if not (isinstance(drafter, type) and issubclass(drafter, Drafter)):
        raise ConfigError(f"{told} is not a Drafter")
    name = getattr(drafter, "name", None)
    if name != entry.name:
        raise ConfigError(f"{told} calls itself {name!r}; both must be the same")
    return drafter


def _package(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"the package {entry.dist.name}"


@cache
def _warn(told: str) -> None:
    """Warn once, not in each look at what is installed."""
    logger.warning(told)


@cache
def installed_drafters() -> Mapping[str, type[Drafter]]:
    """All drafters by name, looked up once in a process: reading what is installed takes
    milliseconds, and states are merged in the only thread of an actor."""
    return MappingProxyType(known_drafters())


def build_drafters(config: DraftingConfig, resources: DraftResources) -> tuple[Drafter, ...]:
    """The configured drafters, in order.

    Raises:
        ConfigError: an unknown drafter or option, or a wrong value; names the known ones.  Or a
            drafter that cannot be built with them.
    """
    known = known_drafters()
    return tuple(_build(drafter, known, resources) for drafter in config.drafters)


def check_drafters(config: DraftingConfig) -> None:
    """Check names and options without building anything.

    Raises:
        ConfigError: as :func:`build_drafters`.
    """
    known = known_drafters()
    for drafter in config.drafters:
        _find(drafter, known)


def merge_drafter_states(kept: bytes, new: bytes) -> bytes:
    """One message from two of :meth:`GuardedDrafters.states`; for drafters that are unknown here,
    or fail, the newer state is taken.

    States that are missing in ``new``, such as those of drafters that are no longer configured, are
    kept if there is room.

    Raises:
        SnapshotError: one of them is corrupt or foreign.
    """
    before, known = unpack_states(kept), installed_drafters()
    merged = unpack_states(new)
    for name in merged.keys() & before.keys() & known.keys():
        merged[name] = _merged(known[name], before[name], merged[name])
    others = {name: state for name, state in before.items() if name not in merged}
    fitting = fit_states(merged, partial(_shrunk, known))
    return pack_states(fitting_states(fitting | others))


def _merged(drafter: type[Drafter], kept: bytes, new: bytes) -> bytes:
    """
    Raises:
        SnapshotError: one of them is corrupt or foreign.
    """
    try:
        return as_state(drafter.merge_states(kept, new))
    except SnapshotError:
        raise
    except Exception as error:
        logger.warning("drafter %s failed in merge_states: %r", drafter.name, error)
        return new


def _shrunk(known: Mapping[str, type[Drafter]], name: str, state: bytes, max_bytes: int) -> bytes:
    """
    Raises:
        SnapshotError: it is corrupt or foreign.
    """
    if name not in known:
        return state
    try:
        return as_state(known[name].shrink_state(state, max_bytes))
    except SnapshotError:
        raise
    except Exception as error:
        logger.warning("drafter %s failed in shrink_state: %r", name, error)
        return state


def _build(
    config: DrafterConfig, known: Mapping[str, type[Drafter]], resources: DraftResources
) -> Drafter:
    drafter, options = _find(config, known)
    build: Any = drafter
    try:
        built: Drafter = build(resources, options)
    except HdserveError:
        raise
    except Exception as error:
        raise ConfigError(f"the drafter {config.name} cannot be built: {error!r}") from error
    return built


def _find(config: DrafterConfig, known: Mapping[str, type[Drafter]]) -> tuple[type[Drafter], Any]:
    """A drafter and its checked options."""
    drafter = known.get(config.name)
    if drafter is None:
        check_installed(config.name)
        raise ConfigError(
            f"unknown drafter {config.name!r}; known drafters: {', '.join(sorted(known))}"
        )
    try:
        options = drafter.options_model.model_validate(config.options)
    except ValidationError as error:
        lines = describe_errors(drafter.options_model, error)
        raise ConfigError("\n".join(f"drafter {config.name}: {line}" for line in lines)) from error
    return drafter, options

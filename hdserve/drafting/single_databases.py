"""Each database of the ``hierarchy`` drafter alone: copies from the request's own text, what the
model generated before, n-grams of a corpus, and the tokens the model itself thought likely."""

from __future__ import annotations

from typing import ClassVar

from hdserve.drafting.hierarchy import Hierarchy, HierarchyOptions


class ContextOptions(HierarchyOptions):
    """Options of the ``context`` drafter."""

    model: bool = False
    statistics: bool = False
    recycled: bool = False


class ContextDrafter(Hierarchy):
    """The ``hierarchy`` drafter with the context database only."""

    name = "context"
    options_model: ClassVar[type[HierarchyOptions]] = ContextOptions


class ModelOptions(HierarchyOptions):
    """Options of the ``model`` drafter."""

    context: bool = False
    statistics: bool = False
    recycled: bool = False


class ModelDrafter(Hierarchy):
    """The ``hierarchy`` drafter with the model database only."""

    name = "model"
    options_model: ClassVar[type[HierarchyOptions]] = ModelOptions


class StatisticsOptions(HierarchyOptions):
    """Options of the ``statistics`` drafter."""

    context: bool = False
    model: bool = False
    recycled: bool = False


class StatisticsDrafter(Hierarchy):
    """The ``hierarchy`` drafter with the statistics database only."""

    name = "statistics"
    options_model: ClassVar[type[HierarchyOptions]] = StatisticsOptions


class RecycledOptions(HierarchyOptions):
    """Options of the ``recycled`` drafter."""

    context: bool = False
    model: bool = False
    statistics: bool = False


class RecycledDrafter(Hierarchy):
    """The ``hierarchy`` drafter with the likeliest tokens of verified contexts only.

    After "Turning Trash into Treasure: Token Recycling" (Luo et al. 2024), with contexts of up to
    three tokens and calibrated scores.
    """

    name = "recycled"
    options_model: ClassVar[type[HierarchyOptions]] = RecycledOptions

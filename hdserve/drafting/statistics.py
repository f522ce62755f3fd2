"""The statistics database alone: n-grams of a corpus."""

from __future__ import annotations

from typing import ClassVar

from hdserve.drafting.hierarchy import Hierarchy, HierarchyOptions


class StatisticsOptions(HierarchyOptions):
    """Options of the ``statistics`` drafter."""

    context: bool = False
    model: bool = False
    recycled: bool = False


class StatisticsDrafter(Hierarchy):
    """The ``hierarchy`` drafter with the statistics database only."""

    name = "statistics"
    options_model: ClassVar[type[HierarchyOptions]] = StatisticsOptions

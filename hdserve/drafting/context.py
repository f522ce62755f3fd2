"""The context database alone: copies from the request's own text."""

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

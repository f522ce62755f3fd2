"""The model database alone: what the model generated before."""

from __future__ import annotations

from typing import ClassVar

from hdserve.drafting.hierarchy import Hierarchy, HierarchyOptions


class ModelOptions(HierarchyOptions):
    """Options of the ``model`` drafter."""

    context: bool = False
    statistics: bool = False
    recycled: bool = False


class ModelDrafter(Hierarchy):
    """The ``hierarchy`` drafter with the model database only."""

    name = "model"
    options_model: ClassVar[type[HierarchyOptions]] = ModelOptions

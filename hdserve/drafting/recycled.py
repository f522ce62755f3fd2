"""What the model itself thought likely, alone: no text at all."""

from __future__ import annotations

from typing import ClassVar

from hdserve.drafting.hierarchy import Hierarchy, HierarchyOptions


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

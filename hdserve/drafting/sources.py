"""The arrays shared by the requests of one namespace, in the form compiled code takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hdserve.databases.namespace_tables import MODEL_ORDERS, NamespaceTables
from hdserve.databases.ngram import Ints
from hdserve.databases.recycled import RECYCLED_ORDERS, RecycledDatabase
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_info import STATISTICS_ORDERS
from hdserve.drafting.arrays import (
    CONTEXT,
    MODEL,
    NUM_LEVELS,
    NUM_ORDERS,
    OTHERS,
    RECYCLED,
    STATISTICS,
    Databases,
)
from hdserve.drafting.base import DraftResources
from hdserve.drafting.handles import HandleTable

CONTEXT_ORDERS = (0, 1, 2, 3)
MAX_NAMESPACES = 256
"""The most namespaces whose tables of arrays are kept."""


class _Partitions(NamedTuple):
    """The partitions of a namespace; ``None`` if nothing was inserted.

    Attributes:
        model: what this model generated.
        others: what another model generated: of those that have something, the best-ranked.
        recycled: the tokens this model thought likely.
    """

    model: NamespaceTables | None
    others: NamespaceTables | None
    recycled: RecycledDatabase | None

    def versions(self) -> tuple[int, ...]:
        """Versions that change when an array is replaced."""
        return tuple(0 if part is None else part.version for part in self)


class NamespaceSources:
    """The partitions that requests of one namespace are drafted from.

    Attributes:
        handles: of :class:`Databases`; the request's own arrays are replaced in a copy.
    """

    __slots__ = ("_partitions", "_versions", "handles")

    def __init__(self, partitions: _Partitions, databases: Databases) -> None:
        self._partitions = partitions
        self._versions = partitions.versions()
        self.handles = HandleTable(databases)

    @property
    def recycled(self) -> RecycledDatabase | None:
        return self._partitions.recycled

    def are(self, partitions: _Partitions) -> bool:
        """Whether the arrays of these partitions are still the same."""
        pairs = zip(self._partitions, partitions, strict=True)
        return all(own is now for own, now in pairs) and self._versions == partitions.versions()


class DraftSources:
    """The sources of every namespace, created when first needed.

    Attributes:
        orders: context lengths by level, see :class:`Databases`.
    """

    def __init__(self, resources: DraftResources) -> None:
        self.orders = _order_table()
        self._resources = resources
        self._ending: Ints = np.array(sorted(resources.ending_token_ids), np.int64)
        self._nothing = NamespaceTables(1 << 14)
        self._known: dict[str, NamespaceSources] = {}
        self._num_replaced = 0
        self._known_version = 0

    def use_statistics(self, statistics: StatisticsDatabase | None) -> None:
        """Use another corpus, or none, in the sources of every namespace."""
        self._resources = replace(self._resources, statistics=statistics)
        self._known.clear()
        self._num_replaced += 1

    @property
    def version(self) -> int:
        """A number that changes before :meth:`of` returns anything else."""
        database = self._resources.model_database
        version = self._num_replaced + (0 if database is None else database.version)
        for other in self._resources.draft_from:
            version += other.version
        return version

    def of(self, namespace: str) -> NamespaceSources:
        """The arrays as they are now."""
        self._forget_replaced()
        known = self._known.get(namespace)
        if known is None:
            if len(self._known) >= MAX_NAMESPACES:
                self._known.clear()
            partitions = self._partitions(namespace)
            known = NamespaceSources(partitions, self._databases(partitions))
            self._known[namespace] = known
        return known

    def forget(self, namespace: str) -> None:
        """Keep no reference to anything of a namespace."""
        self._known.pop(namespace, None)

    def _forget_replaced(self) -> None:
        """Release arrays that no longer belong to a namespace: they hold its text."""
        version = self.version
        if version == self._known_version:
            return
        for namespace, known in list(self._known.items()):
            if not known.are(self._partitions(namespace)):
                del self._known[namespace]
        self._known_version = version

    def _partitions(self, namespace: str) -> _Partitions:
        database = self._resources.model_database
        others = None
        for other in self._resources.draft_from:
            others = others or other.partition(namespace)
        if database is None:
            return _Partitions(None, others, None)
        return _Partitions(database.partition(namespace), others, database.recycled(namespace))

    def _databases(self, partitions: _Partitions) -> Databases:
        """All arrays except those of a request, which are empty."""
        nothing, statistics = self._nothing, self._resources.statistics
        model, others = partitions.model or nothing, partitions.others or nothing
        recycled = partitions.recycled.table if partitions.recycled else nothing.table
        return Databases(
            tokens=nothing.log,
            places=nothing.places,
            context=nothing.table.rows,
            context_size=nothing.table.size,
            model=model.table.rows,
            model_size=model.table.size,
            model_log=model.log,
            model_places=model.places,
            model_state=model.log_state,
            others=others.table.rows,
            others_size=others.table.size,
            statistics=statistics.rows if statistics else nothing.table.rows,
            statistics_size=statistics.size if statistics else nothing.table.size,
            recycled=recycled.rows,
            recycled_size=recycled.size,
            orders=self.orders,
            ending=self._ending,
            state=nothing.log_state,
            last_positions=nothing.log,
        )


def _order_table() -> Ints:
    table = np.full((NUM_LEVELS, NUM_ORDERS), -1, np.int64)
    for level, orders in (
        (CONTEXT, CONTEXT_ORDERS),
        (MODEL, MODEL_ORDERS),
        (OTHERS, MODEL_ORDERS),
        (STATISTICS, STATISTICS_ORDERS),
        (RECYCLED, RECYCLED_ORDERS),
    ):
        table[level, : len(orders)] = orders
    return table

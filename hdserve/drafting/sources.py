"""The arrays shared by the requests of one namespace, in the form compiled code takes them."""

from __future__ import annotations

from dataclasses import replace

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


class NamespaceSources:
    """The arrays that requests of one namespace are drafted from.

    Attributes:
        recycled: the tokens this model thought likely; ``None`` while nothing was kept.
        handles: of :class:`Databases`; the request's own arrays are replaced in a copy.
    """

    __slots__ = ("_databases", "handles", "recycled")

    def __init__(self, databases: Databases, recycled: RecycledDatabase | None) -> None:
        self._databases = databases
        self.recycled = recycled
        self.handles = HandleTable(databases)

    def are(self, databases: Databases) -> bool:
        """Whether these are the same arrays."""
        return all(own is now for own, now in zip(self._databases, databases, strict=True))


class DraftSources:
    """The sources of every namespace, created when first needed.

    Attributes:
        orders: context lengths by level, see :class:`Databases`.
    """

    def __init__(self, resources: DraftResources) -> None:
        self.orders = _order_table()
        self._resources = resources
        own = resources.model_database
        self._model_databases = (*([own] if own else []), *resources.draft_from)
        self._ending: Ints = np.array(sorted(resources.ending_token_ids), np.int64)
        self._nothing = NamespaceTables(1 << 14)
        self._known: dict[str, NamespaceSources] = {}
        self._num_replaced = 0
        self._known_version = 0

    def use_statistics(self, statistics: StatisticsDatabase | None) -> None:
        """Use another statistics database, or none, in the sources of every namespace."""
        self._resources = replace(self._resources, statistics=statistics)
        self._known.clear()
        self._num_replaced += 1

    def catch_up(self) -> None:
        """Have the model databases insert what they deferred.  Nothing else here does: arrays stay
        the present ones until somebody inserts, or calls this."""
        for database in self._model_databases:
            database.catch_up()

    @property
    def version(self) -> int:
        """A number that changes before :meth:`of` returns anything else."""
        version = self._num_replaced
        for database in self._model_databases:
            version += database.version
        return version

    def of(self, namespace: str, former: NamespaceSources | None = None) -> NamespaceSources:
        """The arrays as they are now.

        When the version has changed, those of all namespaces are released: they hold text that may
        have been dropped.

        Args:
            former: what was returned earlier; it is returned again if the arrays are the same.
        """
        version = self.version
        if version != self._known_version:
            self._known.clear()
            self._known_version = version
        known = self._known.get(namespace)
        if known is None:
            if len(self._known) >= MAX_NAMESPACES:
                self._known.clear()
            known = self._found(namespace, former)
            self._known[namespace] = known
        return known

    def _found(self, namespace: str, former: NamespaceSources | None) -> NamespaceSources:
        database = self._resources.model_database
        recycled = None if database is None else database.recycled(namespace)
        databases = self._databases(namespace, recycled)
        if former is not None and former.are(databases):
            return former
        return NamespaceSources(databases, recycled)

    def forget(self, namespace: str) -> None:
        """Keep no reference to anything of a namespace."""
        self._known.pop(namespace, None)

    def _databases(self, namespace: str, kept: RecycledDatabase | None) -> Databases:
        """All arrays except those of a request, which are empty.

        What other models generated is of the best-ranked that has something.
        """
        nothing, statistics = self._nothing, self._resources.statistics
        database = self._resources.model_database
        model = (database.peek(namespace) if database else None) or nothing
        others = nothing
        for other in reversed(self._resources.draft_from):
            others = other.peek(namespace) or others
        recycled = kept.table if kept else nothing.table
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

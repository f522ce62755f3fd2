"""Hierarchy Drafting as in the paper (arXiv 2502.05609): chains from one database after another.

Each database maps one token to the n-grams that followed it.  Context, model and statistics are
searched in this order (or another, for comparison) until ``num_chains`` chains of ``chain_tokens``
tokens are found; a database that is not needed is not searched.  Unlike in the authors' code every
completed n-gram is inserted, the model database gives its most frequent n-grams first, and equal
beginnings are merged.  The lookahead branch is left out: it needs the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from types import MappingProxyType
from typing import ClassVar

from pydantic import Field

from hdserve.config import StrictModel
from hdserve.core import Sequence, Source
from hdserve.databases.namespace_tables import NamespaceTables
from hdserve.databases.ngram import most_frequent
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.drafting.base import Drafter, DraftResources, Forward, MemoryUsage
from hdserve.tree import Acceptance, DraftTree

MAX_NAMESPACES = 256
"""The most namespaces whose n-grams are kept.  The least recently used are dropped first, and read
again when they are used again."""

_NGRAM_BYTES = 90
"""About what an n-gram takes beside the tokens of its chain."""

_COUNTER_BYTES = 350
"""About what a first token takes beside its n-grams."""

Chain = tuple[int, ...]

_SOURCES: Mapping[str, Source] = MappingProxyType(
    {"c": Source.CONTEXT, "m": Source.MODEL, "s": Source.STATISTICS}
)


class HierarchyPaperOptions(StrictModel):
    """Options of the ``hierarchy-paper`` drafter."""

    num_chains: int = Field(default=7, ge=1)
    """Most guesses in one step."""

    chain_tokens: int = Field(default=4, ge=1)
    """Length of a guess."""

    order: str = Field(default="cms", pattern="^[cms]{1,3}$")
    """Which databases are searched, and in which order: context, model, statistics."""

    max_ngrams: int = Field(default=100_000, ge=2)
    """Most n-grams of the model database, as in the paper; above it the rarest half of a namespace
    is dropped, and the namespaces that were not used for longest."""


class _Ngrams:
    """Continuations by token with their counts, newest last."""

    def __init__(self, chain_tokens: int, max_ngrams: int) -> None:
        self._chain_tokens = chain_tokens
        self._max_ngrams = max_ngrams
        self._chains: dict[int, Counter[Chain]] = {}
        self._num_ngrams = 0

    @property
    def usage(self) -> MemoryUsage:
        """How many there are, and about how many bytes they take."""
        num_bytes = self._num_ngrams * (_NGRAM_BYTES + 8 * self._chain_tokens)
        return MemoryUsage(self._num_ngrams, num_bytes + len(self._chains) * _COUNTER_BYTES)

    def add(self, token_ids: list[int], begin: int) -> None:
        """Insert the n-grams that end in ``token_ids[begin:]``."""
        size = self._chain_tokens
        for end in range(max(begin + 1, size + 1), len(token_ids) + 1):
            chains = self._chains.setdefault(token_ids[end - size - 1], Counter())
            chain = tuple(token_ids[end - size : end])
            count = chains.pop(chain, 0)
            self._num_ngrams += count == 0
            chains[chain] = count + 1
        if self._num_ngrams > self._max_ngrams:
            self._forget()

    def _forget(self) -> None:
        """Keep the most frequent half, of equally frequent ones the newest, in their order."""
        everything = [
            (count, token, chain)
            for token, chains in self._chains.items()
            for chain, count in chains.items()
        ]
        num_kept = min(len(everything), self._max_ngrams // 2)
        by_count = sorted(range(len(everything)), key=lambda place: (everything[place][0], place))
        self._chains = {}
        for place in sorted(by_count[len(everything) - num_kept :]):
            count, token, chain = everything[place]
            self._chains.setdefault(token, Counter())[chain] = count
        self._num_ngrams = num_kept

    def newest(self, token: int, num: int) -> list[Chain]:
        return list(reversed(self._chains.get(token, {})))[:num]

    def most_frequent(self, token: int, num: int) -> list[Chain]:
        chains = self._chains.get(token)
        return [chain for chain, _ in chains.most_common(num)] if chains else []


@dataclass(slots=True)
class _Followed:
    """The n-grams of a partition of the model database, read up to ``position`` of its log."""

    partition: NamespaceTables
    ngrams: _Ngrams
    position: int = 0


class HierarchyPaper(Drafter):
    """The paper's method, as a baseline."""

    name = "hierarchy-paper"
    options_model: ClassVar[type[HierarchyPaperOptions]] = HierarchyPaperOptions

    def __init__(
        self, resources: DraftResources, options: HierarchyPaperOptions | None = None
    ) -> None:
        self._options = options or HierarchyPaperOptions()
        self._resources = resources
        self._model: dict[str, _Followed] = {}
        """The followed databases by namespace, the least recently used first."""
        self._running: set[_Ngrams] = set()

    def start(self, seq: Sequence) -> None:
        ngrams = self._new_ngrams()
        ngrams.add([*seq.speculation.prediction, *seq.token_ids], 0)
        seq.drafter_state[self.name] = ngrams
        self._running.add(ngrams)
        self._follow_model(seq.namespace)

    def _new_ngrams(self) -> _Ngrams:
        return _Ngrams(self._options.chain_tokens, self._options.max_ngrams)

    def _follow_model(self, namespace: str) -> None:
        """Read what was added to the model database since the last request, but no more than could
        be kept."""
        database = self._resources.model_database
        partition = database.partition(namespace) if database else None
        known = self._model.pop(namespace, None)
        if partition is None:
            return
        if known is None or known.partition is not partition:
            known = _Followed(partition, self._new_ngrams())
        begin = max(known.position, partition.log_end - self._options.max_ngrams)
        for text in partition.texts_since(begin):
            known.ngrams.add(text, 0)
        known.position = partition.log_end
        self._model[namespace] = known
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        most = self._options.max_ngrams
        while len(self._model) > 1 and (
            len(self._model) > MAX_NAMESPACES or self.learned().num_entries > most
        ):
            del self._model[next(iter(self._model))]

    def forget(self, namespace: str) -> None:
        self._model.pop(namespace, None)

    def use_statistics(self, statistics: StatisticsDatabase | None) -> None:
        self._resources = replace(self._resources, statistics=statistics)

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        num = self._options.num_chains
        chains: list[tuple[Chain, Source]] = []
        for letter in self._options.order:
            source = _SOURCES[letter]
            if len(chains) < num and seq.speculation.allows(source):
                chains += [(chain, source) for chain in self._chains(seq, source, num)]
        for chain, source in chains[:num]:
            tree.add_path(takewhile(self._is_known, chain), source)

    def _is_known(self, token_id: int) -> bool:
        """Whether the model has the token; its tokenizer may have more."""
        return 0 <= token_id < self._resources.vocab_size

    def _chains(self, seq: Sequence, source: Source, num: int) -> list[Chain]:
        """The chains of one database after the last token, at most ``num`` of them."""
        last = seq.token_ids[-1]
        if source is Source.CONTEXT:
            own: _Ngrams = seq.drafter_state[self.name]
            return own.newest(last, num)
        if source is Source.STATISTICS:
            return self._corpus_chains(seq)
        known = self._model.get(seq.namespace)
        return known.ngrams.most_frequent(last, num) if known else []

    def _corpus_chains(self, seq: Sequence) -> list[Chain]:
        """The likeliest tokens after the last two or one, each continued greedily."""
        statistics = self._resources.statistics
        if statistics is None:
            return []

        def after(context: list[int], k: int) -> list[int]:
            for size in (2, 1):
                found = most_frequent(statistics.rows, statistics.size, context[-size:], k)
                if found:
                    return [token for token, _ in found]
            return []

        chains = []
        for token in after(seq.token_ids[-2:], self._options.num_chains):
            context = [*seq.token_ids[-1:], token]
            while len(context) <= self._options.chain_tokens and (best := after(context, 1)):
                context += best
            chains.append(tuple(context[1:]))
        return chains

    def observe(
        self, seq: Sequence, tree: DraftTree, acceptance: Acceptance, forward: Forward | None
    ) -> None:
        ngrams: _Ngrams = seq.drafter_state[self.name]
        size = self._options.chain_tokens
        num_new = len(acceptance.token_ids)
        tail = seq.token_ids[-(num_new + size) :]
        ngrams.add(tail, len(tail) - num_new)

    def held(self) -> MemoryUsage:
        return _sum_of(self._running)

    def learned(self) -> MemoryUsage:
        return _sum_of(known.ngrams for known in self._model.values())

    def finish(self, seq: Sequence) -> None:
        self._running.discard(seq.drafter_state.pop(self.name, None))


def _sum_of(kept: Iterable[_Ngrams]) -> MemoryUsage:
    usages = [ngrams.usage for ngrams in kept]
    return MemoryUsage(
        sum(usage.num_entries for usage in usages), sum(usage.num_bytes for usage in usages)
    )

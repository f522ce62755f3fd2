"""The model database: what one model generated before, per namespace.

Every replica holds one; it gets the replica's own outputs and, through a log that replicas share,
those of others.  A namespace is a partition with its own tables, and every call names one, so that
text of one tenant cannot be drafted for another.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hdserve.core import Sequence as RequestSequence
from hdserve.databases.answer_places import prompt_hash
from hdserve.databases.byte_budget import ByteBudget
from hdserve.databases.namespace_tables import MODEL_ORDERS, NamespaceTables
from hdserve.databases.ngram import MAX_TOKEN_ID, START, Tokens, num_valid
from hdserve.databases.recycled import RecycledDatabase

TokenIds = Sequence[int] | npt.NDArray[np.uint32] | npt.NDArray[np.int32]

RECYCLED_SHARE = 16
"""One part in this many of a database's bytes holds the tokens the model thought likely."""

MAX_PUT_OFF_TOKENS: Final = 1024
"""Outputs are deferred until they have this many tokens together, or somebody reads or catches up.
Between forwards, which leave other data in the processor's caches, inserting each output by itself
takes three times as long (docs/adr/0030)."""

MAX_COUNTED_TOKENS: Final = 4096
"""This many tokens of a long output are counted at once, which takes 2 to 3 ms.  More can only be
uncounted if the sequence ran alone, so that nobody else could have drafted them meanwhile."""

LEAST_SHARE = 32
"""At least one part in this many of the deferred tokens is inserted at a time, so it ends."""

_COUNTED = "model_database"
"""Key of a sequence's ``drafter_state``: the partition its output was counted in, and how many of
its tokens; ``None`` once it is recorded."""


class _PutOff(NamedTuple):
    """The deferred output of an ended sequence, with the hash of its prompt, and how many of its
    tokens were counted in which partition."""

    namespace: str
    prompt_hash: int
    output: list[int]
    counted: tuple[int, int]


class _Said(NamedTuple):
    """A part of an output whose first ``num_known`` tokens are counted already; with it,
    ``num_counted`` tokens of the output are."""

    text: list[int]
    num_known: int
    num_counted: int


class ModelDatabase:
    """What one model generated before.

    Owned by one thread.  Takes no memory before something is inserted.

    Args:
        max_bytes: limit of all namespaces together; the least valuable contexts and the oldest
            text are forgotten first, those of the largest namespace, see
            :class:`~hdserve.databases.byte_budget.ByteBudget`.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self.version = 0
        """Changes whenever an array of any namespace is added, removed or replaced.  What is
        deferred changes it when it is inserted."""
        self._num_partitions = 0
        self._put_off: deque[_PutOff] = deque()
        self.num_put_off_tokens = 0
        """Tokens of the outputs that are deferred, in whole or in part."""
        recycled_bytes = max_bytes // RECYCLED_SHARE
        self._texts: ByteBudget[NamespaceTables] = ByteBudget(
            max_bytes - recycled_bytes, self._note_change
        )
        self._recycled: ByteBudget[RecycledDatabase] = ByteBudget(recycled_bytes, self._note_change)

    def _note_change(self) -> None:
        self.version += 1

    def _caught_up(self) -> ByteBudget[NamespaceTables]:
        """The partitions, once all deferred outputs are inserted, as readers must see them."""
        self.catch_up()
        return self._texts

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Namespaces that hold text, least recently fed first."""
        return self._caught_up().namespaces

    @property
    def num_tokens(self) -> int:
        """Tokens inserted, except those dropped with their namespace."""
        return sum(partition.num_tokens for partition in self._caught_up())

    @property
    def num_entries(self) -> int:
        """Texts inserted, except those dropped with their namespace."""
        return sum(partition.num_texts for partition in self._caught_up())

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return self.num_text_bytes + self.num_recycled_bytes

    @property
    def num_text_bytes(self) -> int:
        """The bytes of generated text."""
        return self._caught_up().num_bytes

    @property
    def num_recycled_bytes(self) -> int:
        """The bytes of the tokens the model thought likely."""
        return self._recycled.num_bytes

    @property
    def num_recycled_entries(self) -> int:
        """Contexts for which tokens the model thought likely are kept."""
        return sum(recycled.num_entries for recycled in self._recycled)

    @property
    def num_given_up(self) -> int:
        """Contexts of text that namespaces gave up for other namespaces."""
        return self._caught_up().num_given_up

    @property
    def num_dropped(self) -> int:
        """Namespaces whose text was dropped because there are too many of them."""
        return self._caught_up().num_dropped

    def partition(self, namespace: str) -> NamespaceTables | None:
        """The tables of a namespace; ``None`` while nothing was inserted."""
        return self._caught_up().get(namespace)

    def peek(self, namespace: str) -> NamespaceTables | None:
        """The tables of a namespace without what is deferred.  Nothing is inserted, so arrays found
        before are still the present ones."""
        return self._texts.get(namespace)

    def recycled(self, namespace: str) -> RecycledDatabase | None:
        """What the model thought likely in a namespace; ``None`` while nothing was kept."""
        return self._recycled.get(namespace)

    def recycling(self, namespace: str, num_new: int) -> RecycledDatabase:
        """The likely tokens of a namespace, created if there are none, to which up to ``num_new``
        contexts are to be added; its rows may be another array now."""
        found = self._recycled.use(namespace, RecycledDatabase)
        while found.table.is_reserve_low(num_new):
            self._note_change()
            found.table.reserve_more(num_new)
        found.table.advance_stamp()
        self._recycled.note(namespace)
        return found

    def insert(
        self,
        namespace: str,
        token_ids: TokenIds,
        num_counted: int = 0,
        prompt: int | None = None,
    ) -> None:
        """Add one finished output of the model.

        Ids that cannot be tokens (negative, or above 1,048,575) end the text before them.

        Args:
            num_counted, prompt: see :meth:`NamespaceTables.insert`.
        """
        tokens = _text(token_ids)
        if len(tokens) > 1:
            with self._fed(namespace) as partition:
                partition.insert(tokens, num_counted, prompt)

    def answer_place(
        self, namespace: str, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> int:
        """Where in the log of a namespace the last recorded answer to a prompt goes on after
        ``output``, as far as outputs are inserted; 0 if none is there that begins with it and goes
        on."""
        partition = self.peek(namespace)
        if partition is None or not partition.answers.num_bytes:
            return 0
        return partition.answer_place(prompt_hash(prompt), output)

    def apply(self, namespace: str, outputs: Iterable[TokenIds]) -> None:
        """Add finished outputs of other replicas, oldest first."""
        for token_ids in outputs:
            self.insert(namespace, token_ids)

    def record(self, seq: RequestSequence) -> None:
        """Add the output of a sequence that has ended; done by the time somebody reads.

        Does nothing for a sequence that does not share its output or was recorded before.
        """
        counted = seq.drafter_state.get(_COUNTED, (0, 0))
        if not seq.speculation.is_output_shared or counted is None:
            return
        seq.drafter_state[_COUNTED] = None
        prompt, output = seq.token_ids[: seq.num_prompt_tokens], seq.output_token_ids
        self._put_off.append(_PutOff(seq.namespace, prompt_hash(prompt), output, counted))
        self.num_put_off_tokens += len(output)
        if self.num_put_off_tokens >= MAX_PUT_OFF_TOKENS:
            self.catch_up()

    def catch_up(self) -> None:
        """Insert the deferred outputs; the rest of a long output in the next calls."""
        while self._put_off:
            put_off = self._put_off.popleft()
            self.num_put_off_tokens -= len(put_off.output)
            num_counted = self._num_still_counted(put_off.namespace, put_off.counted)
            most = max(MAX_COUNTED_TOKENS, self.num_put_off_tokens // LEAST_SHARE)
            if len(put_off.output) > num_counted + most:
                said = _said(put_off.output, 0, num_counted, most)
                if said is not None:
                    counted = self._count(put_off.namespace, [said]), said.num_counted
                    self._put_off.appendleft(put_off._replace(counted=counted))
                    self.num_put_off_tokens += len(put_off.output)
                    return
            self.insert(put_off.namespace, put_off.output, num_counted, put_off.prompt_hash)

    def _count(self, namespace: str, said: Sequence[_Said]) -> int:
        """Count parts of outputs; returns the number of their partition."""
        token_ids = [token_id for each in said for token_id in each.text]
        parts = [(len(each.text), each.num_known) for each in said]
        with self._fed(namespace) as partition:
            partition.count(np.array(token_ids, np.int32), parts)
        return partition.number

    def record_running(self, sequences: Iterable[RequestSequence]) -> None:
        """Count what running sequences have generated since then, so that others can draft it.

        Of each at most the oldest ``MAX_COUNTED_TOKENS`` are counted.  Copies of more than a few
        tokens can only be made of outputs that have ended.  Does nothing for sequences that do not
        share their output.
        """
        by_namespace: defaultdict[str, list[RequestSequence]] = defaultdict(list)
        for seq in sequences:
            by_namespace[seq.namespace].append(seq)
        for namespace, members in by_namespace.items():
            found = [(seq, self._said_since(seq)) for seq in members]
            said = [(seq, new) for seq, new in found if new is not None]
            if not said:
                continue
            number = self._count(namespace, [new for _, new in said])
            for seq, new in said:
                seq.drafter_state[_COUNTED] = number, new.num_counted

    def _said_since(self, seq: RequestSequence) -> _Said | None:
        """The part of a running sequence that is to be counted next."""
        counted = seq.drafter_state.get(_COUNTED, (0, 0))
        if not seq.speculation.is_output_shared or counted is None:
            return None
        num_counted = self._num_still_counted(seq.namespace, counted)
        return _said(seq.token_ids, seq.num_prompt_tokens, num_counted, MAX_COUNTED_TOKENS)

    def _num_still_counted(self, namespace: str, counted: tuple[int, int]) -> int:
        """How many tokens of a sequence were counted in the current partition of the namespace."""
        number, num_tokens = counted
        partition = self._texts.get(namespace)
        return num_tokens if partition is not None and partition.number == number else 0

    def clear(self, namespace: str | None = None) -> None:
        """Forget one namespace, or all."""
        kept = [each for each in self._put_off if namespace not in (None, each.namespace)]
        self._put_off = deque(kept)
        self.num_put_off_tokens = sum(len(each.output) for each in kept)
        if namespace is None:
            self._texts.clear()
            self._recycled.clear()
        else:
            self._texts.drop(namespace)
            self._recycled.drop(namespace)

    @contextmanager
    def _fed(self, namespace: str) -> Iterator[NamespaceTables]:
        """The partition of a namespace, created if there is none, to add to."""
        partition = self._texts.use(namespace, self._new_partition)
        before = partition.arrays
        try:
            yield partition
        finally:
            if any(old is not new for old, new in zip(before, partition.arrays, strict=True)):
                self._note_change()
            self._texts.note(namespace)

    def _new_partition(self, max_bytes: int) -> NamespaceTables:
        self._num_partitions += 1
        return NamespaceTables(max_bytes, self._num_partitions)


def _said(token_ids: list[int], begin: int, num_counted: int, num_new: int) -> _Said | None:
    """The part to count next of an output that begins at ``begin``: up to ``num_new`` tokens, and
    before them the context they need; ``None`` if there is nothing, or an id that cannot be a
    token."""
    first = max(0, num_counted - MODEL_ORDERS[-1])
    text = token_ids[begin + first : begin + num_counted + num_new]
    num_known = num_counted - first
    if len(text) <= num_known or min(text) < 0 or max(text) > MAX_TOKEN_ID:
        return None
    if first == 0:
        return _Said([START, *text], num_known + 1, len(text))
    return _Said(text, num_known, first + len(text))


def _text(token_ids: TokenIds) -> Tokens:
    """``START`` and the tokens before the first id that cannot be a token."""
    tokens = np.empty(len(token_ids) + 1, np.int32)
    tokens[0] = START
    try:
        tokens[1:] = np.array(token_ids, np.int32)
    except OverflowError:  # numbers beyond int32
        tokens[1:] = [each if 0 <= each <= MAX_TOKEN_ID else START for each in token_ids]
    return tokens[: 1 + num_valid(tokens)]

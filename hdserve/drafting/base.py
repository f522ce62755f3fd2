"""What a draft source is: the contract between a drafter and the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hdserve.config import StrictModel
from hdserve.core import Sequence, Source
from hdserve.tree import Acceptance, DraftTree

if TYPE_CHECKING:
    from hdserve.databases.model import ModelDatabase
    from hdserve.databases.statistics import StatisticsDatabase


class Forward(Protocol):
    """What a drafter may read of the forward that verified a tree.

    Nodes are those of the tree, rejected ones included.
    """

    def top_tokens(self, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The ``k`` likeliest next tokens after every node and their logits.

        Returns:
            Two arrays ``[num_nodes, k]``, the likeliest first; all drafters get the same.
        """
        ...

    def hidden(self, node: int) -> Any:
        """The last hidden state of ``node``, a tensor of shape ``[hidden_size]``.

        Only for drafters that set ``needs_hidden``.
        """
        ...


class MemoryUsage(NamedTuple):
    """What a drafter holds: contexts of running sequences, or states, and bytes."""

    num_entries: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DraftResources:
    """The inputs a drafter may be built with.

    Attributes:
        vocab_size: every drafted id is below it.
        model_database: what this model generated before; ``None`` if it is switched off.
        statistics: the database of the model's tokenizer; ``None`` if there is none.
        draft_from: model databases of other models of the same tokenizer, ranked lower.
        ending_token_ids: tokens after which nothing follows.
        shares_output: whether answers to some requests may be used to draft for others.
    """

    vocab_size: int
    model_database: ModelDatabase | None = None
    statistics: StatisticsDatabase | None = None
    draft_from: tuple[ModelDatabase, ...] = ()
    ending_token_ids: frozenset[int] = frozenset()
    shares_output: bool = True


class Verified(NamedTuple):
    """A tree that was verified and the result, see :meth:`Drafter.observe`."""

    seq: Sequence
    tree: DraftTree
    acceptance: Acceptance
    forward: Forward | None


class Drafter(ABC):
    """Guesses the next tokens of sequences.

    One thread at a time calls it, in a server always the same.  For each sequence the order of
    calls is ``start``, then any number of ``propose`` and ``observe``, then ``finish``.  No method
    does I/O or waits.  The engine catches and counts exceptions and continues without this
    drafter's guess; a wrong guess costs time, never a wrong token.

    What it keeps beyond a sequence it keeps by ``seq.namespace``, and nothing of one whose
    ``speculation.is_output_shared`` is false, or where ``resources.shares_output`` is.

    Attributes:
        name: as in the configuration and the registry.
        options_model: the allowed ``options`` of :class:`~hdserve.config.DrafterConfig`.
        needs_hidden: whether ``observe`` reads ``forward.hidden``.
    """

    name: ClassVar[str]
    options_model: ClassVar[type[StrictModel]] = StrictModel
    needs_hidden: ClassVar[bool] = False

    def __init__(  # noqa: B027 - optional
        self, resources: DraftResources | None = None, options: Any = None
    ) -> None:
        """The registry passes both; ``options`` is an ``options_model``."""

    def warm_up(self) -> None:  # noqa: B027 - optional
        """Do what takes long before the first request: compile, touch memory."""

    def use_statistics(  # noqa: B027 - optional
        self, statistics: StatisticsDatabase | None
    ) -> None:
        """Draft from these, or from none, from now on, instead of ``resources.statistics``;
        called between two steps, and valid for running sequences too."""

    def start(self, seq: Sequence) -> None:  # noqa: B027 - optional
        """The first drafts of ``seq`` are wanted; its ``token_ids`` are the prompt and any tokens
        already decoded without drafts."""

    @abstractmethod
    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        """Add guesses to ``tree``, whose root is the last of ``seq.token_ids``; only from sources
        that ``seq.speculation`` allows.  If several drafters are configured, the likeliest guesses
        of all are taken.

        The tree has only its root, or begins with one path of tokens that are certain to come,
        because the answer must have a certain form.  Guesses after the end of that path are useful,
        guesses that branch off it are dropped; guesses equal to it are merged, so guessing from the
        root is fine too.
        """

    def observe(  # noqa: B027 - optional
        self, seq: Sequence, tree: DraftTree, acceptance: Acceptance, forward: Forward | None
    ) -> None:
        """``tree`` was verified and ``acceptance.token_ids`` are now the end of ``seq.token_ids``.

        Tokens of steps without drafting are reported later, before the next ``propose``, several at
        once: as an accepted path of nodes from ``Source.PLAIN``.

        ``forward`` is ``None`` for tokens that are reported later, if recorded output is replayed
        without a model, and while the model is so fast that reading its forwards would not pay: it
        may be there in one call and missing in the next.
        """

    def finish(self, seq: Sequence) -> None:  # noqa: B027 - optional
        """``seq`` has ended for whatever reason; drop what is kept for it."""

    def lookup_times_s(self, seq: Sequence) -> dict[Source, float]:
        """How long each source alone would take now to draft for ``seq``; drafts nothing.

        For metrics, called now and then between two steps.  A drafter with a single source need not
        implement it.
        """
        return {}

    def held(self) -> MemoryUsage:
        """What is held for running sequences now; for metrics, called now and then between two
        steps."""
        return MemoryUsage()

    def learned(self) -> MemoryUsage:
        """What is kept of what was learned from all requests: states, and bytes; for metrics."""
        return MemoryUsage()

    def state(self, namespace: str) -> bytes | None:
        """What was learned from the requests of ``namespace``, to share with other replicas; no
        text, some tens of kB.  ``None`` if there is nothing new."""
        return None

    def adopt(self, namespace: str, state: bytes) -> None:  # noqa: B027 - optional
        """Take over the result of :meth:`merge_states` from the replicas' states.

        Raises:
            SnapshotError: it is corrupt or foreign.
        """

    def forget(self, namespace: str) -> None:  # noqa: B027 - optional
        """Drop what was learned from the requests of ``namespace``, or adopted, at an operator's
        request; running requests may still use it, but no longer share it."""

    @classmethod
    def merge_states(cls, kept: bytes, new: bytes) -> bytes:
        """Merge two results of :meth:`state`; called in another process.

        Raises:
            SnapshotError: one of them is corrupt or foreign.
        """
        return new

    @classmethod
    def shrink_state(cls, state: bytes, max_bytes: int) -> bytes:
        """``state`` with less in it, so that it shares a message with those of other drafters; if
        it stays larger than ``max_bytes`` it may be left out.

        Raises:
            SnapshotError: it is corrupt or foreign.
        """
        return state


class BatchDrafter(Drafter):
    """A drafter that learns from all sequences of a step at once, because that takes less time; an
    exception then loses what it would have learned from each."""

    @abstractmethod
    def observe_all(self, verified: Collection[Verified]) -> None:
        """:meth:`observe` for several different sequences at once."""

    def observe(
        self, seq: Sequence, tree: DraftTree, acceptance: Acceptance, forward: Forward | None
    ) -> None:
        self.observe_all([Verified(seq, tree, acceptance, forward)])

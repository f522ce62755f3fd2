"""Replay recorded outputs through the drafters that serve, without a model.

The target model is the recording: a step yields the longest path of the draft tree that the
recorded response follows, and one bonus token.  The first token of a response comes from prefill.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count, islice

from hdserve.bench.named_drafters import NamedDrafters
from hdserve.bench.replay_files import ReplayRow
from hdserve.bench.replay_result import ReplayResult, ReplayStep
from hdserve.core import SamplingParams, Source
from hdserve.core import Sequence as RequestSequence
from hdserve.databases.model import ModelDatabase
from hdserve.drafting.base import Drafter
from hdserve.journal import Journal
from hdserve.tree import Acceptance, DraftTree


class ReplayMode(StrEnum):
    """The content of the cross-request databases: ``cold`` clears them before each request,
    ``online`` starts empty and keeps, ``warm`` starts from the fill files and keeps."""

    COLD = "cold"
    ONLINE = "online"
    WARM = "warm"


@dataclass(slots=True)
class _Running:
    """A request that is being replayed.

    Attributes:
        kept_steps: of a request that an interrupted replay had finished; ``None`` for others.
    """

    seq: RequestSequence
    row: ReplayRow
    unit: str
    start_s: float
    kept_steps: list[ReplayStep] | None = None
    steps: list[ReplayStep] = field(default_factory=list)


class Replay:
    """Replays requests, one after another or some at a time.

    Args:
        drafters: fill one tree together.
        model_database: cleared, kept or filled by the mode; outputs are added when they end, and
            while requests run, if the drafters do so.
        budget: most drafted tokens of a request and step.
        concurrency: requests that take their steps in turn.

    Raises:
        HdserveError: a drafter fails; the message says which, and where.
    """

    def __init__(
        self,
        drafters: Iterable[Drafter],
        model_database: ModelDatabase,
        mode: ReplayMode,
        budget: int,
        max_depth: int | None,
        concurrency: int = 1,
    ) -> None:
        self._drafters = NamedDrafters(drafters)
        self._database = model_database
        self._mode = mode
        self._budget = budget
        self._max_depth = max_depth
        self._concurrency = concurrency
        self.result = ReplayResult()

    def fill(self, rows: Iterable[ReplayRow], on_row: Callable[[], None] | None = None) -> None:
        """Record finished requests before the replay, as serving would have.

        Args:
            on_row: called after each request.
        """
        for row in rows:
            seq = _sequence(row, row.name)
            seq.token_ids += row.response
            self._database.record(seq)
            if on_row is not None:
                on_row()

    def run(
        self,
        rows: Iterable[ReplayRow],
        on_row: Callable[[], None] | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Replay ``rows`` and add to ``result``.

        Args:
            on_row: called after each request, including restored ones.
            journal: where finished requests are kept and restored from.  The steps of a restored
                one are shown to the drafters again, one by one and in turn with the others, so that
                they and the database are in the same state for the next request; only its drafts
                are not made again. Of its trees drafters see the accepted part, and how much was
                expected of how many nodes.
        """
        journal = journal or Journal(None, {})
        waiting = deque(enumerate(rows))
        running: deque[_Running] = deque()
        while waiting or running:
            if waiting and len(running) < self._concurrency:
                number, row = waiting.popleft()
                running.append(self._start(row, number, journal))
                continue
            request = running.popleft()
            if request.seq.num_output_tokens < len(request.row.response):
                self._step(request)
                running.append(request)
                continue
            self._finish(request, journal)
            if on_row:
                on_row()

    def _start(self, row: ReplayRow, number: int, journal: Journal) -> _Running:
        unit = f"request {number}"
        if self._mode is ReplayMode.COLD:
            self._database.clear()
        seq = _sequence(row, f"{row.name}#{number}")
        begin = time.perf_counter()
        self._drafters.start(seq)
        request = _Running(seq, row, unit, time.perf_counter() - begin)
        if unit in journal:
            kept = journal.once(unit, dict)
            request.start_s = kept["start_s"]
            request.kept_steps = [ReplayStep(*step) for step in kept["steps"]]
        self.result.start_s_per_token.append(request.start_s / max(1, len(row.prompt)))
        first = DraftTree(seq.token_ids[-1] if seq.token_ids else 0, 0)
        if row.response:
            self._observe(seq, first, Acceptance((0,), row.response[:1]))
        return request

    def _finish(self, request: _Running, journal: Journal) -> None:
        seq, row = request.seq, request.row
        self._drafters.finish(seq)
        journal.once(request.unit, lambda: {"start_s": request.start_s, "steps": request.steps})
        if not row.response:
            return
        self._database.record(seq)
        result = self.result
        result.num_requests += 1
        result.num_tokens += len(row.response) - 1
        result.tokens_by_task[row.task] += len(row.response) - 1
        result.database_bytes = max(result.database_bytes, self._database.num_bytes)

    def _step(self, request: _Running) -> None:
        if request.kept_steps is None:
            step = self._draft(request.seq, request.row)
        else:
            step = request.kept_steps[len(request.steps)]
            self._say_again(request.seq, request.row, step)
        request.steps.append(step)
        self.result.count_step(request.row.task, step)

    def _draft(self, seq: RequestSequence, row: ReplayRow) -> ReplayStep:
        tree = DraftTree(seq.token_ids[-1], self._budget, self._max_depth)
        begin = time.perf_counter()
        self._drafters.propose(seq, tree)
        draft_s = time.perf_counter() - begin
        acceptance = verify_recorded(tree, row.response[seq.num_output_tokens :])
        return ReplayStep(
            len(acceptance.token_ids),
            tree.num_draft_tokens,
            sum(tree.scores) - 1.0,
            tuple(int(tree.sources[node]) for node in acceptance.path[1:]),
            draft_s,
            self._observe(seq, tree, acceptance),
        )

    def _say_again(self, seq: RequestSequence, row: ReplayRow, step: ReplayStep) -> None:
        position, num_accepted = seq.num_output_tokens, len(step.sources)
        token_ids = row.response[position : position + step.num_tokens]
        tree = DraftTree(seq.token_ids[-1], step.num_draft_tokens)
        score = step.expected_tokens / max(1, step.num_draft_tokens)
        for node, source in enumerate(step.sources):
            tree.add_node(node, token_ids[node], Source(source), score)
        num_others = step.num_draft_tokens - num_accepted
        others = (token_id for token_id in count() if token_id != token_ids[0])
        for token_id in islice(others, num_others):
            tree.add_node(0, token_id, Source.CONTEXT, score)
        self._observe(seq, tree, Acceptance(tuple(range(num_accepted + 1)), token_ids))

    def _observe(self, seq: RequestSequence, tree: DraftTree, acceptance: Acceptance) -> float:
        path, token_ids = acceptance.path, acceptance.token_ids
        seq.token_ids += token_ids
        begin = time.perf_counter()
        self._drafters.observe(seq, tree, Acceptance(path[: len(token_ids)], token_ids))
        return time.perf_counter() - begin


def verify_recorded(tree: DraftTree, remaining: Sequence[int]) -> Acceptance:
    """Return the acceptance of a tree by a model that will generate ``remaining`` (not empty).

    The bonus token is left out if the recording ends with an accepted token.
    """
    children: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for node in range(1, len(tree)):
        children[tree.parents[node]][tree.token_ids[node]] = node
    path, chosen = [0], []
    for token_id in remaining:
        chosen.append(token_id)
        child = children[path[-1]].get(token_id)
        if child is None or len(chosen) == len(remaining):
            if child is not None:
                path.append(child)
            break
        path.append(child)
    return Acceptance(tuple(path), tuple(chosen))


def _sequence(row: ReplayRow, request_id: str) -> RequestSequence:
    seq = RequestSequence(request_id, list(row.prompt), SamplingParams(temperature=0.0))
    seq.max_total_tokens = len(row.prompt) + len(row.response)
    return seq

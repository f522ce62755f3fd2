"""The engine: one step is schedule, draft, forward, verify, commit."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from operator import index

from hdserve import core
from hdserve.core import FinishReason, StepOutput
from hdserve.databases.recycled import NUM_TOP
from hdserve.drafting.base import Verified
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.decoder import SequenceDecoder
from hdserve.engine.decoder_factory import DecoderFactory
from hdserve.engine.faults import NoToken, SequenceFault
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.forward.node_outputs import NodeOutputs
from hdserve.engine.loading.compilation import CompilationResult
from hdserve.engine.sampling.batched_choices import Nodes, choose_together
from hdserve.engine.scheduling.scheduler import Scheduled, Scheduler, Slot
from hdserve.engine.scheduling.step_drafts import StepDrafts
from hdserve.engine.stats import EngineStats, count_draft
from hdserve.errors import HdserveError, InvalidRequest
from hdserve.tree import Acceptance, DraftTree

logger = logging.getLogger(__name__)


class Engine:
    """Decodes many sequences together; drafts make it faster and never change a token.

    Not thread-safe: one thread owns it.

    Args:
        factory: says which sequences can be answered, and makes their decoders.
        on_finish: called with every sequence that ended, whatever the reason; used for later
            drafts only, so decoding goes on when it fails.
        compilation: the compiled model, available some time later; the engine switches to it when
            it is there, and stays as it is if it never is.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        drafts: StepDrafts,
        factory: DecoderFactory,
        *,
        on_finish: Callable[[core.Sequence], None] | None,
        compilation: Future[CompilationResult] | None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._drafts = drafts
        self.drafters = drafts.drafters
        self._factory = factory
        self._on_finish = on_finish
        self._compilation = compilation
        self._decoders: dict[str, SequenceDecoder] = {}
        self._outputs: deque[StepOutput] = deque()
        """Outputs that were not handed out yet."""
        self._undecided: tuple[core.Sequence, int, int] | None = None
        """The sequence whose tokens are being decided, and how many of them and of ``_outputs``
        there were before."""
        self._is_unfinished = False
        """Whether something was begun after whose interruption the running sequences end; ending
        them may be interrupted too."""
        self._stats = EngineStats(num_steps_by_draft_tokens=[0] * (drafts.max_draft_tokens + 1))

    @property
    def has_work(self) -> bool:
        return self.has_outputs or self._scheduler.has_work or self._is_unfinished

    @property
    def has_outputs(self) -> bool:
        """Whether there are outputs to hand out without another step."""
        return bool(self._outputs)

    def forget_prefixes(self) -> None:
        """Let no request reuse what ended or running sequences left in the KV cache."""
        self._scheduler.forget_prefixes()

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt and output together: the model's limit, or less if the cache is small."""
        return self._factory.max_total_tokens

    @property
    def is_exact(self) -> bool:
        """Whether a row's result does not depend on what else is in a forward."""
        return self._runner.shapes.is_exact

    @property
    def is_compiled(self) -> bool:
        """Whether the model runs as one compiled graph."""
        return self._runner.compiled is not None

    @property
    def stats(self) -> EngineStats:
        """The counters; the same object every time."""
        stats = self._stats
        stats.num_kv_tokens = self._runner.cache.num_rows
        stats.num_running = len(self._scheduler.running)
        stats.num_waiting = len(self._scheduler.waiting)
        stats.kv_cache_usage = self._scheduler.usage
        stats.num_drafter_failures = dict(self.drafters.num_failures)
        stats.num_drafter_sequences = self.drafters.num_sequences
        stats.drafter_times_s = dict(self.drafters.times_s)
        budget = self._drafts.budget
        if budget is not None:
            stats.num_proposed_tokens = budget.num_proposed_tokens
            stats.num_kept_tokens = budget.num_kept_tokens
        return stats

    def lookup_times_s(self) -> dict[core.Source, float]:
        """How long each source alone takes to draft for one of the running sequences."""
        for slot in self._scheduler.running:
            if self.drafters.has_started(slot.seq):
                return self.drafters.lookup_times_s(slot.seq)
        return {}

    def add(self, seq: core.Sequence) -> None:
        """Queue ``seq`` and set its ``max_total_tokens``.

        Raises:
            InvalidRequest: it can never be answered; nothing was queued.
            ArithmeticError, TypeError, ValueError: an unchecked invalid value; nothing was queued.
        """
        self.check(seq)
        seq.max_total_tokens = self.max_total_tokens
        if seq.params.max_tokens is not None:
            wanted = seq.num_prompt_tokens + index(seq.params.max_tokens)
            seq.max_total_tokens = min(wanted, self.max_total_tokens)
        self._decoders[seq.request_id] = self._factory.make(seq)
        self._scheduler.add(seq)

    def check(self, seq: core.Sequence) -> None:
        """
        Raises:
            InvalidRequest: ``seq`` can never be answered.
        """
        if seq.request_id in self._decoders:
            raise InvalidRequest(f"the request id {seq.request_id!r} is in use", "request_id")
        self._factory.check(seq)

    def abort(self, request_id: str) -> None:
        """End a sequence now; its slot and its drafter state are freed at once.  One that has ended
        stays as it is, and no later step reports it.

        If this is interrupted, the running sequences end as in :meth:`run`.
        """
        if self._is_unfinished:
            self._end_running()
        others = (out for out in self._outputs if out.sequence.request_id != request_id)
        self._outputs = deque(others)
        self._finish_or_end(lambda: self._abort(request_id))

    def _abort(self, request_id: str) -> None:
        decoder = self._decoders.get(request_id)
        if decoder is None:
            return
        seq = decoder.seq
        if seq in self._scheduler.waiting:
            self._scheduler.withdraw(seq)
            seq.finish_reason = FinishReason.ABORT
            self._finish(seq)
            return
        for slot in self._scheduler.running:
            if slot.seq is seq:
                slot.seq.finish_reason = FinishReason.ABORT
                self._release(slot)
                return
        del self._decoders[request_id]  # of one that was not queued: add() was interrupted

    def step(self) -> list[StepOutput]:
        """Run one forward, as :meth:`run`, and return its outputs.

        Returns:
            One output per sequence that got tokens or ended; after an interruption perhaps both.
        """
        self.run()
        outputs, self._outputs = self._outputs, deque()
        return [*outputs]

    def hand_out(self, receive: Callable[[StepOutput], None]) -> None:
        """Call ``receive`` with all outputs not handed out yet, in order.

        If this is interrupted nothing is lost: the next call begins with the same output, which
        ``receive`` may already have seen.
        """
        if self._is_unfinished:
            self._end_running()
        while self._outputs:
            receive(self._outputs[0])
            self._outputs.popleft()

    def run(self) -> None:
        """Run one forward over everything that is scheduled; its outputs are kept until they are
        handed out.

        If it is interrupted, by ``KeyboardInterrupt`` or an exception, the running sequences end
        with an error output; waiting ones go on, and nothing of the cache is reused.
        """
        if self._is_unfinished:
            self._end_running()
        self._finish_or_end(self._step)

    def _finish_or_end(self, act: Callable[[], None]) -> None:
        """Call ``act``; if it is interrupted, end the running sequences, now or in the next
        call."""
        self._is_unfinished = True
        try:
            act()
            self._is_unfinished = False
        except BaseException:
            self._end_running()
            raise

    def _end_running(self) -> None:
        """End all running sequences with an error and the tokens already decided; nothing in the
        cache can be trusted.  If this is interrupted the next call continues it."""
        self._is_unfinished = True
        self._forget_undecided()
        told = {out.sequence.request_id for out in self._outputs if out.finish_reason is not None}
        self._scheduler.reset()
        for request_id, decoder in [*self._decoders.items()]:
            seq = decoder.seq
            if seq in self._scheduler.waiting:
                continue
            if request_id not in told:
                seq.finish_reason = FinishReason.ERROR
                error = HdserveError("this request was decoded in a step that was interrupted")
                self._outputs.append(StepOutput(seq, finish_reason=seq.finish_reason, error=error))
            self._finish(seq)
        self._is_unfinished = False

    def _forget_undecided(self) -> None:
        """Take back the tokens of an interrupted step that are in no output yet."""
        if self._undecided is not None:
            seq, num_tokens, num_outputs = self._undecided
            if len(self._outputs) == num_outputs:
                del seq.token_ids[num_tokens:]
            self._undecided = None

    def _step(self) -> None:
        """Append the outputs to ``_outputs``."""
        started = time.perf_counter()
        if self._compilation is not None and self._compilation.done():
            self._switch_to_compiled(self._compilation)
        for seq in self._scheduler.make_room():
            self._decoders[seq.request_id].set_aside()
            self._stats.num_preemptions += 1
        for seq in self._scheduler.admit():
            if seq.admitted_s is None:  # not readmitted after a preemption
                self._count_admitted(seq)
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return
        trees = self._drafts.trees(scheduled)
        drafted = time.perf_counter()
        chunks = [self._chunk(work, tree) for work, tree in zip(scheduled, trees, strict=True)]
        is_read = self._drafts.are_read and any(
            tree is not None and tree.capacity for tree in trees
        )
        forwarded = self._runner.forward(chunks, NUM_TOP if is_read else 1)
        verifying = time.perf_counter()
        num_tokens, ended = self._verify(scheduled, trees, forwarded)
        elapsed = time.perf_counter() - started  # the rest only concerns sequences that ended
        own_s = self._drafts.took(elapsed, verifying - drafted)
        num_drafts = sum(tree.num_draft_tokens for tree in trees if tree is not None)
        self._scheduler.took(scheduled, own_s, num_drafts)
        for slot in ended:
            self._release(slot)
        self._count_step(started, drafted, verifying, num_tokens)

    def _chunk(self, work: Scheduled, tree: DraftTree | None) -> Chunk:
        seq = work.slot.seq
        first = seq.num_cached_tokens
        assert 0 <= first < len(seq.token_ids), "the last token is decided, but not cached"
        token_ids = seq.token_ids[first : first + work.num_tokens]
        race = None
        if tree is not None and self._runner.finds_tokens:
            race = self._decoders[seq.request_id].race(tree)
        return Chunk(work.slot.segment, first, token_ids, tree, work.num_scored_tokens, race)

    def _switch_to_compiled(self, compilation: Future[CompilationResult]) -> None:
        self._compilation = None
        error = compilation.exception()
        if error is not None:
            logger.warning("the model stays uncompiled: %s", error)
            return
        found = compilation.result()
        if self.is_exact and not found.shapes.is_exact:
            logger.warning("the model stays uncompiled: compiled forwards would not be exact")
            return
        self._runner.compile_with(found.compiled)
        self._runner.shapes = found.shapes
        self._scheduler.forget_step_times()
        if found.shapes.is_exact:
            self._scheduler.forget_prefixes()
        budget = self._drafts.budget
        if budget is not None and found.cost is not None:
            budget.change_cost(found.cost)

    def _verify(
        self,
        scheduled: Sequence[Scheduled],
        trees: Sequence[DraftTree | None],
        forwarded: Sequence[NodeOutputs | None],
    ) -> tuple[int, list[Slot]]:
        """The number of tokens that were decided, and the slots of the sequences that ended."""
        moves: list[tuple[int, int]] = []
        ended: list[Slot] = []
        verified: list[Verified] = []
        if self._runner.chooses_together:
            forwarded = self._with_draws(scheduled, trees, forwarded)
        for work, tree, outputs in zip(scheduled, trees, forwarded, strict=True):
            seq = work.slot.seq
            if seq.num_prefilled_tokens < seq.num_prompt_tokens:
                self._count_prefilled(seq, seq.num_cached_tokens + work.num_tokens)
            self._undecided = seq, len(seq.token_ids), len(self._outputs)
            one = self._decide(work, tree, outputs)
            self._undecided = None
            if one is not None:
                verified.append(one)
                moves += _moves(work.slot, one.acceptance)
            if seq.finish_reason is not None:
                ended.append(work.slot)
        self._runner.cache.keep(moves)
        self._drafts.observe(verified)
        return sum(len(one.acceptance.token_ids) for one in verified), ended

    def _with_draws(
        self,
        scheduled: Sequence[Scheduled],
        trees: Sequence[DraftTree | None],
        forwarded: Sequence[NodeOutputs | None],
    ) -> list[NodeOutputs | None]:
        """``forwarded``, with tokens drawn for all sequences at once where the forward has drawn
        none and the choice at a node depends on its logits alone."""
        found: dict[int, Nodes] = {}
        each = zip(scheduled, trees, forwarded, strict=True)
        for number, (work, tree, outputs) in enumerate(each):
            if tree is not None and outputs is not None and outputs.drawn is None:
                nodes = self._decoders[work.slot.seq.request_id].nodes(tree, outputs)
                if nodes is not None:
                    found[number] = nodes
        drawn = dict(zip(found, choose_together([*found.values()]), strict=True))
        return [
            outputs._replace(drawn=drawn[number]) if outputs and number in drawn else outputs
            for number, outputs in enumerate(forwarded)
        ]

    def _decide(
        self, work: Scheduled, tree: DraftTree | None, outputs: NodeOutputs | None
    ) -> Verified | None:
        """Append the output for the request, and return the result of verifying ``tree``; nothing
        inside its prompt.

        If its decoder fails on a value of the request, or logits are not finite, only this sequence
        ends: with the tokens from before the step, and nothing left in the cache.
        """
        seq = work.slot.seq
        decoder, num_tokens = self._decoders[seq.request_id], len(seq.token_ids)
        try:
            if outputs is not None and outputs.prompt_logits is not None:
                decoder.score(outputs.prompt_logits)
            if tree is None or outputs is None:
                seq.num_cached_tokens += work.num_tokens
                return None
            acceptance, output = decoder.commit(tree, decoder.decide(tree, outputs))
        except SequenceFault as fault:
            if isinstance(fault, NoToken) and self._tries_again(work):
                return None
            logger.exception("request %s failed; other requests are not affected", seq.request_id)
            work.slot.leaves_nothing = True
            self._outputs.append(_failed(seq, num_tokens))
            return None
        seq.num_cached_tokens = len(seq.token_ids) - 1
        self._scheduler.offer(work.slot)
        one = None
        if acceptance.token_ids:
            count_draft(tree, acceptance, seq.counts, self._stats.drafts)
            self._stats.num_steps_by_draft_tokens[tree.num_draft_tokens] += 1
            one = Verified(seq, tree, acceptance, outputs)
        self._outputs.append(output)
        return one

    def _tries_again(self, work: Scheduled) -> bool:
        """Whether the rows of a sequence go through the model once more, this time and from then on
        without drafts.

        With PyTorch's attention, a draft whose values are not finite spoils other rows of the
        sequence: a masked column has weight 0, but 0 times infinity or NaN is NaN.
        """
        if not work.may_draft:
            return False
        work.slot.is_plain = True
        return True

    def _release(self, slot: Slot) -> None:
        self._scheduler.release(slot)
        self._finish(slot.seq)

    def _finish(self, seq: core.Sequence) -> None:
        if self.drafters.has_started(seq):
            self.drafters.finish(seq)
        del self._decoders[seq.request_id]
        assert seq.finish_reason is not None
        counts = self._stats.num_finished
        counts[seq.finish_reason] = counts.get(seq.finish_reason, 0) + 1
        if self._on_finish is not None:
            self.drafters.run("engine", "on_finish", self._on_finish, seq)

    def _count_admitted(self, seq: core.Sequence) -> None:
        seq.admitted_s = time.monotonic()
        seq.num_reused_tokens = seq.num_cached_tokens
        self._count_prefilled(seq, seq.num_reused_tokens)
        if self._scheduler.looks_up(seq):
            self._stats.num_queried_tokens += seq.num_prompt_tokens
        self._stats.num_reused_tokens += seq.num_reused_tokens

    def _count_prefilled(self, seq: core.Sequence, num_tokens: int) -> None:
        """Note that the first ``num_tokens`` tokens are in the KV cache."""
        before = seq.num_prefilled_tokens
        seq.num_prefilled_tokens = max(before, min(num_tokens, seq.num_prompt_tokens))
        self._stats.num_prompt_tokens += seq.num_prefilled_tokens - before

    def _count_step(
        self, started: float, drafted: float, verifying: float, num_tokens: int
    ) -> None:
        """``forward_s`` includes packing the rows; ``draft_s`` includes scheduling."""
        stats, now = self._stats, time.perf_counter()
        stats.num_steps += 1
        stats.num_output_tokens += num_tokens
        stats.times.draft_s += drafted - started
        stats.times.forward_s += verifying - drafted
        stats.times.verify_s += now - verifying


def _failed(seq: core.Sequence, num_tokens: int) -> StepOutput:
    """The end of a sequence that keeps the first ``num_tokens`` of its tokens."""
    del seq.token_ids[num_tokens:]
    seq.finish_reason = FinishReason.ERROR
    error = HdserveError("this request could not be decoded; the server's log says why")
    return StepOutput(seq, finish_reason=FinishReason.ERROR, error=error)


def _moves(slot: Slot, acceptance: Acceptance) -> Iterator[tuple[int, int]]:
    """Cache rows ``(from, to)`` that move the accepted path next to the columns before it, once its
    tokens count as cached."""
    root_row = slot.segment.start + slot.seq.num_cached_tokens - len(acceptance.token_ids)
    for depth, node in enumerate(acceptance.path):
        if node != depth:
            yield root_row + node, root_row + depth

"""One sequence's way from logits to tokens and text, up to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from math import isfinite
from operator import index

import torch

from hdserve.core import FinishReason, Sequence, Source, StepOutput, TokenLogprob
from hdserve.engine.batch.races import Race
from hdserve.engine.faults import FAULTS_OF_ONE_REQUEST, NoToken, SequenceFault
from hdserve.engine.forward.node_outputs import NodeOutputs
from hdserve.engine.kernels.draw import NO_TOKEN
from hdserve.engine.sampling.batched_choices import Nodes
from hdserve.engine.sampling.logits_processor import LogitsProcessor
from hdserve.engine.sampling.logprobs import chosen_logprobs
from hdserve.engine.sampling.prompt_scorer import PromptScorer
from hdserve.engine.sampling.sampler import choose_checked, inverse_temperature
from hdserve.engine.sampling.verifier import verify
from hdserve.engine.structured_output.grammar import GrammarState
from hdserve.engine.tokenization.detokenizer import Detokenizer
from hdserve.noise import position_key, sequence_key
from hdserve.tree import Acceptance, DraftTree


@dataclass(slots=True)
class SequenceDecoder:
    """Chooses the tokens of one sequence and knows when it is over.

    Attributes:
        ending_token_ids: tokens that end it.
        stop_token_ids: those of them that end it because the request says so.
        detokenizer: ``None`` if only token ids are wanted.
        logits_processor: ``None`` when a choice depends on the logits alone.
        grammar: what the output must match; ``None`` allows everything.
        scorer: of the prompt; ``None`` when its log probabilities are not wanted, or known already.
    """

    seq: Sequence
    ending_token_ids: frozenset[int]
    stop_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None
    logits_processor: LogitsProcessor | None = None
    grammar: GrammarState | None = None
    scorer: PromptScorer | None = None
    _grammar_ends: list[FinishReason | None] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _noise_key: int = field(init=False)

    def __post_init__(self) -> None:
        self._noise_key = sequence_key(self.seq.params.seed, self.seq.choice_index)

    def set_aside(self) -> None:
        """Hold no memory of the device until the next choice."""
        if self.logits_processor is not None:
            self.logits_processor.set_aside()

    def score(self, prompt_logits: torch.Tensor) -> None:
        """Score the next tokens of the prompt, one for each row of ``[rows, vocab_size]``.

        Raises:
            SequenceFault: a token cannot be scored.
        """
        assert self.scorer is not None, "nobody asked for these logits"
        try:
            self.scorer.push(prompt_logits)
        except FAULTS_OF_ONE_REQUEST as error:
            raise SequenceFault from error

    def race(self, tree: DraftTree) -> Race | None:
        """The race in which a forward can draw the token after each node of ``tree``, if that is
        what decides."""
        params = self.seq.params
        if params.has_filters or not self._is_sampled_freely:
            return None
        return Race(self._keys(tree), inverse_temperature(params))

    def nodes(self, tree: DraftTree, outputs: NodeOutputs) -> Nodes | None:
        """The nodes of ``tree``, if the choice at each depends on its logits alone."""
        if not self._is_sampled_freely:
            return None
        return Nodes(outputs.logits, self.seq.params, self._keys(tree))

    @property
    def _is_sampled_freely(self) -> bool:
        return self._is_free and not self.seq.params.is_greedy

    def _keys(self, tree: DraftTree) -> list[int]:
        root, depths = len(self.seq.token_ids), tree.depths
        of_depth = [position_key(self._noise_key, root + depth) for depth in range(max(depths) + 1)]
        return [of_depth[depth] for depth in depths]

    def decide(self, tree: DraftTree, outputs: NodeOutputs) -> Acceptance:
        """Verify ``tree``: the model's choices at ``outputs``, as far as the tree predicts them.

        Raises:
            NoToken: no first token can be chosen.
            SequenceFault: a value of the request makes a choice impossible.
        """
        self._grammar_ends.clear()
        choose_next = self._chooser(outputs)
        recorded = self.seq.recorded_token_ids
        if recorded is not None:
            choose_next = _repeated(choose_next, recorded[self.seq.num_output_tokens :])
        acceptance = verify(tree, choose_next)
        self._logprobs = self._scored(acceptance, outputs)
        return acceptance

    def _scored(self, acceptance: Acceptance, outputs: NodeOutputs) -> list[TokenLogprob]:
        """The log probabilities of the chosen tokens, if they are wanted."""
        num_top = self.seq.params.logprobs
        if num_top is None:
            return []
        try:
            logits = outputs.logits[acceptance.path]
            return chosen_logprobs(logits, acceptance.token_ids, index(num_top))
        except FAULTS_OF_ONE_REQUEST as error:
            raise SequenceFault from error

    def _chooser(self, outputs: NodeOutputs) -> Callable[[int], int]:
        """A function that gives the model's choice at a node; call it along one path from the
        root."""
        params = self.seq.params
        if outputs.drawn is not None:
            return _drawn_at(outputs.drawn)
        if params.is_greedy and self._is_free:
            return _likeliest(*outputs.likeliest())
        positions = count(len(self.seq.token_ids))
        return lambda node: self._choose(outputs.logits[node : node + 1].float(), next(positions))

    @property
    def _is_free(self) -> bool:
        """Whether a choice does not depend on earlier choices."""
        return self.logits_processor is None and self.grammar is None

    def _choose(self, logits: torch.Tensor, position: int) -> int:
        try:
            return self._chosen(logits, position)
        except FAULTS_OF_ONE_REQUEST as error:
            raise SequenceFault from error

    def _chosen(self, logits: torch.Tensor, position: int) -> int:
        params = self.seq.params
        key = position_key(self._noise_key, position)
        token_id, may_be_chosen = choose_checked(logits, self._shaped(logits), params, key)
        if not may_be_chosen:
            shaped = self._shaped(logits, may_end=self.grammar is not None)
            token_id, may_be_chosen = choose_checked(logits, shaped, params, key)
            if token_id == NO_TOKEN or not (may_be_chosen or self._has_failed_grammar):
                raise NoToken
        if self.logits_processor is not None:
            self.logits_processor.push(token_id)
        if self.grammar is not None:
            self.grammar.push(token_id)
            self._grammar_ends.append(_end_of(self.grammar))
        return token_id

    def _shaped(self, logits: torch.Tensor, *, may_end: bool = False) -> torch.Tensor:
        """``[1, vocab_size]``: ``logits`` after the history and the grammar were applied.

        Args:
            may_end: allow ending tokens whatever ``min_tokens`` says.
        """
        if self.logits_processor is not None:
            logits = self.logits_processor.apply(logits, may_end=may_end)
        return logits if self.grammar is None else self.grammar.apply(logits)

    @property
    def _has_failed_grammar(self) -> bool:
        return self.grammar is not None and self.grammar.error is not None

    def commit(self, tree: DraftTree, acceptance: Acceptance) -> tuple[Acceptance, StepOutput]:
        """Append the chosen tokens, at most up to the one that ends the sequence.

        Returns:
            The part of the acceptance that was used, and what to tell the request.

        Raises:
            SequenceFault: a token cannot be decoded.
        """
        seq = self.seq
        if seq.num_remaining_tokens:
            texts = self._append(acceptance.token_ids)
        else:  # only the prompt was asked for
            texts, seq.finish_reason = [], FinishReason.LENGTH
        num_used = len(texts)
        is_shaped = self.logits_processor is not None
        if is_shaped and self._may_stop and not seq.params.has_lasting_terms:
            self.logits_processor = None
        used = acceptance
        if num_used < len(acceptance.token_ids):
            used = Acceptance(acceptance.path[:num_used], acceptance.token_ids[:num_used])
        drafted = [tree.sources[node] for node in acceptance.path[1 : num_used + 1]]
        plain = [Source.PLAIN] * (num_used - len(drafted))
        output = StepOutput(
            seq,
            token_ids=tuple(used.token_ids),
            sources=(*drafted, *plain),
            texts=tuple(texts),
            draft=tree,
            logprobs=None if seq.params.logprobs is None else tuple(self._logprobs[:num_used]),
            prompt_logprobs=None if self.scorer is None else self._take_prompt_logprobs(),
            finish_reason=seq.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )
        return used, output

    def _append(self, token_ids: Iterable[int]) -> list[str]:
        """Append tokens, at most up to the one that ends the sequence; the text of each."""
        seq, texts = self.seq, list[str]()
        own, min_length = seq.token_ids, seq.num_prompt_tokens + seq.params.min_tokens
        for number, token_id in enumerate(token_ids):
            own.append(token_id)
            may_stop = len(own) >= min_length
            grammar_end = self._grammar_ends[number] if self.grammar else None
            is_over = grammar_end is FinishReason.STOP and token_id not in self.stop_token_ids
            is_ending = (may_stop or is_over) and token_id in self.ending_token_ids
            texts.append(self._push(token_id, is_ending=is_ending, may_stop=may_stop))
            seq.finish_reason = grammar_end or self._finish_reason(is_ending=is_ending)
            if seq.finish_reason is not None:
                texts[-1] += self._finish_text()
                break
        return texts

    def _take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        assert self.scorer is not None
        scorer, self.scorer = self.scorer, None
        return scorer.finish()

    @property
    def _error(self) -> Exception | None:
        has_failed = self.seq.finish_reason is FinishReason.ERROR
        return self.grammar.error if has_failed and self.grammar is not None else None

    def _push(self, token_id: int, *, is_ending: bool, may_stop: bool) -> str:
        if self.detokenizer is None:
            return ""
        if is_ending and not self.seq.params.include_stop_str_in_output:
            return ""
        try:
            return self.detokenizer.push(token_id, may_stop=may_stop)
        except FAULTS_OF_ONE_REQUEST as error:
            raise SequenceFault from error

    def _finish_text(self) -> str:
        """The rest of the text, which may contain a stop string."""
        if self.detokenizer is None:
            return ""
        text = self.detokenizer.finish(may_stop=self._may_stop)
        if self.detokenizer.is_stopped and self.seq.finish_reason is FinishReason.LENGTH:
            self.seq.finish_reason = FinishReason.STOP
        return text

    def _finish_reason(self, *, is_ending: bool) -> FinishReason | None:
        if is_ending or (self.detokenizer is not None and self.detokenizer.is_stopped):
            return FinishReason.STOP
        return None if self.seq.num_remaining_tokens > 0 else FinishReason.LENGTH

    @property
    def _stop_reason(self) -> str | int | None:
        """The stop string or token id of the request that ended the sequence."""
        if self.seq.finish_reason is not FinishReason.STOP:
            return None
        if self.detokenizer is not None and self.detokenizer.is_stopped:
            return self.detokenizer.found_stop
        last = self.seq.token_ids[-1]
        return last if self._may_stop and last in self.stop_token_ids else None

    @property
    def _may_stop(self) -> bool:
        return self.seq.num_output_tokens >= self.seq.params.min_tokens


def _repeated(choose: Callable[[int], int], token_ids: tuple[int, ...]) -> Callable[[int], int]:
    """``token_ids``, one after the other, while the model chooses as if they were not forced."""
    coming = iter(token_ids)

    def repeat(node: int) -> int:
        choose(node)
        return next(coming, 0)

    return repeat


def _drawn_at(token_ids: list[int]) -> Callable[[int], int]:
    """The token of each node, if there is one."""

    def choose(node: int) -> int:
        if token_ids[node] == NO_TOKEN:
            raise NoToken
        return token_ids[node]

    return choose


def _likeliest(token_ids: list[int], logits: list[float]) -> Callable[[int], int]:
    """The likeliest token of each node, if its logit is finite."""

    def choose(node: int) -> int:
        if not isfinite(logits[node]):
            raise NoToken
        return token_ids[node]

    return choose


def _end_of(grammar: GrammarState) -> FinishReason | None:
    if grammar.error is not None:
        return FinishReason.ERROR
    return FinishReason.STOP if grammar.is_complete else None

"""Building the records of an answer from the engine's outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from deployments.generation import (
    Alternative,
    Delta,
    DraftedToken,
    GenerationRequest,
    Summary,
    TokenInfo,
)
from deployments.parsers.reasoning_parser import Split
from deployments.prediction import count_prediction
from deployments.replica.reasoning_reader import ReasoningReader
from deployments.replica.request_metrics import RequestClock
from hdserve.core import DraftCounts, Sequence, StepOutput, TokenLogprob
from hdserve.engine.stats import add_counts
from hdserve.tree import DraftTree

if TYPE_CHECKING:
    from hdserve.engine.tokenization.tokenizer import Tokenizer

_NUM_CACHED_TOKENS = 1 << 14
"""The most tokens whose bytes are cached: prompts that are scored have many tokens, often the
same ones."""


LOWEST_LOGPROB = -9999.0
"""The log probability shown for anything less likely, as vLLM does."""


class RecordBuilder:
    """Builds deltas and summaries.

    Args:
        replica: which replica answers.
        shows_rejected: whether drafts include what the model rejected.
    """

    def __init__(self, tokenizer: Tokenizer, replica: str, *, shows_rejected: bool = True) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = lru_cache(_NUM_CACHED_TOKENS)(tokenizer.token_bytes)
        self._replica = replica
        self._shows_rejected = shows_rejected

    def deltas(
        self,
        outputs: Iterable[StepOutput],
        reasoning: Mapping[str, ReasoningReader],
        *,
        includes_sources: bool,
        due_prompts: set[int] | None = None,
    ) -> list[Delta]:
        """Return what steps added to choices, in their order; several deltas for a step with
        reasoning after text.

        Args:
            reasoning: by sequence id the reader of a choice's reasoning; without one everything is
                text.
            due_prompts: the prompts whose log probabilities are wanted and have not been sent;
                those that are sent now are removed.
        """
        return [
            delta
            for output in outputs
            for delta in self._deltas(
                output,
                reasoning.get(output.sequence.request_id),
                includes_sources=includes_sources,
                due_prompts=due_prompts,
            )
        ]

    def _deltas(
        self,
        output: StepOutput,
        reader: ReasoningReader | None,
        *,
        includes_sources: bool,
        due_prompts: set[int] | None,
    ) -> list[Delta]:
        """Return what a step added to a choice: the first piece with all tokens of the step, and
        any further pieces."""
        first, *others = [Split("", output.text)] if reader is None else reader.read(output)
        seq = output.sequence
        prompt_index, choice_index = map(int, seq.request_id.rsplit("/", 2)[1:])
        prompt_logprobs: tuple[TokenInfo, ...] = ()
        if due_prompts and prompt_index in due_prompts and output.prompt_logprobs is not None:
            due_prompts.remove(prompt_index)
            prompt_logprobs = self._prompt(seq, output.prompt_logprobs)
        delta = Delta(
            prompt_index=prompt_index,
            choice_index=choice_index,
            text=first.text,
            token_ids=output.token_ids,
            sources=tuple(int(source) for source in output.sources),
            logprobs=None if output.logprobs is None else self._answer(seq, output.logprobs),
            finish_reason=output.finish_reason and str(output.finish_reason),
            texts=output.texts if includes_sources else None,
            draft=self._draft(output) if includes_sources else (),
            prompt_logprobs=prompt_logprobs,
            reasoning=first.reasoning if reader and reader.num_tokens else None,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_reused_tokens=seq.num_reused_tokens,
            temperature=seq.params.temperature,
            top_p=seq.params.top_p,
            stop_reason=output.stop_reason,
        )
        return _followed(delta, others) if others else [delta]

    def summary(
        self,
        request: GenerationRequest,
        sequences: Iterable[Sequence],
        clocks: Iterable[RequestClock],
        reasoning: Collection[ReasoningReader] = (),
    ) -> Summary:
        """Return the totals of all choices; a prompt counts once, however many choices it
        has."""
        sequences = list(sequences)
        counts = DraftCounts()
        for seq in sequences:
            add_counts(counts, seq.counts)
        firsts_s = [clock.first_token_s for clock in clocks]
        return Summary(
            num_prompt_tokens=sum(seq.num_prompt_tokens for seq in sequences)
            // request.num_choices,
            num_output_tokens=sum(seq.num_output_tokens for seq in sequences),
            drafts=counts,
            replica=self._replica,
            first_token_s=min((value for value in firsts_s if value is not None), default=None),
            num_reused_tokens=sum(seq.num_reused_tokens for seq in sequences)
            // request.num_choices,
            prediction=None if request.prediction is None else count_prediction(sequences),
            num_reasoning_tokens=sum(reader.num_tokens for reader in reasoning)
            if reasoning
            else None,
        )

    def _draft(self, output: StepOutput) -> tuple[DraftedToken, ...]:
        tree = output.draft
        if tree is None:
            return ()
        accepted = [*_path(tree, output.token_ids)]
        shown = range(1, len(tree)) if self._shows_rejected else accepted
        places = {node: place for place, node in enumerate(shown, 1)}
        return tuple(
            DraftedToken(
                text=self._token_bytes(tree.token_ids[node]).decode(errors="replace"),
                source=int(tree.sources[node]),
                parent=places.get(tree.parents[node], 0),
                is_accepted=node in accepted,
            )
            for node in shown
        )

    def _prompt(
        self, seq: Sequence, logprobs: Iterable[TokenLogprob | None]
    ) -> tuple[TokenInfo, ...]:
        first_id = seq.token_ids[0]
        first = TokenInfo(self._token_bytes(first_id), None, (), first_id)
        return (first, *(self._info(item) for item in logprobs if item is not None))

    def _answer(self, seq: Sequence, logprobs: Iterable[TokenLogprob]) -> tuple[TokenInfo, ...]:
        special = self._tokenizer.special_token_ids if seq.params.skip_special_tokens else ()
        infos = map(self._info, logprobs)
        return tuple(info._replace(is_skipped=info.token_id in special) for info in infos)

    def _info(self, logprob: TokenLogprob) -> TokenInfo:
        data = self._token_bytes
        top = tuple(Alternative(data(token), _shown(value), token) for token, value in logprob.top)
        token_id = logprob.token_id
        return TokenInfo(data(token_id), _shown(logprob.logprob), top, token_id, logprob.rank)


def _followed(delta: Delta, pieces: Iterable[Split]) -> list[Delta]:
    """Return ``delta``, and one without tokens for each of ``pieces``; what ``delta`` ends is ended
    by the last of them."""
    bare = Delta(
        delta.prompt_index,
        delta.choice_index,
        "",
        token_ids=(),
        sources=(),
        logprobs=None,
        finish_reason=None,
        texts=None if delta.texts is None else (),
        num_prompt_tokens=delta.num_prompt_tokens,
        num_reused_tokens=delta.num_reused_tokens,
        temperature=delta.temperature,
        top_p=delta.top_p,
    )
    others = [bare._replace(text=text, reasoning=reasoning) for reasoning, text in pieces]
    others[-1] = others[-1]._replace(
        finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
    )
    return [delta._replace(finish_reason=None, stop_reason=None), *others]


def _shown(logprob: float) -> float:
    """Return a number that JSON can express: it has neither infinity, for impossible tokens, nor
    NaN, of a model that overflowed."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def _path(tree: DraftTree, token_ids: Iterable[int]) -> Iterator[int]:
    """Yield the nodes along ``token_ids``, as far as the tree has them."""
    node = 0
    for token_id in token_ids:
        child = tree.child(node, token_id)
        if child is None:
            return
        yield child
        node = child

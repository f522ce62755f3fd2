"""Which requests a model can answer, and the decoder of each."""

from __future__ import annotations

from operator import index
from typing import Any, cast

from hdserve.core import SamplingParams, Sequence
from hdserve.engine.decoder import SequenceDecoder
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.request_check import check_params, check_prompt_length, check_token_ids
from hdserve.engine.sampling.allowed_tokens import AllowedTokens
from hdserve.engine.sampling.logits_processor import LogitsProcessor, seen_tokens
from hdserve.engine.sampling.prompt_scorer import PromptScorer
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.tokenization.detokenizer import Detokenizer
from hdserve.errors import InvalidRequest


class DecoderFactory:
    """Makes a :class:`SequenceDecoder` for every sequence that can be answered.

    Args:
        max_total_tokens: longest prompt and output together.
        backend: the ``tokenizers.Tokenizer`` that makes text; ``None`` for token ids only.
        grammars: compiles the grammars of structured output; ``None`` offers none.
    """

    def __init__(
        self,
        model: LoadedModel,
        max_total_tokens: int,
        backend: Any,
        grammars: Grammars | None,
    ) -> None:
        self._model = model
        self.max_total_tokens = max_total_tokens
        self._backend = backend
        self._grammars = grammars

    def check(self, seq: Sequence) -> None:
        """
        Raises:
            InvalidRequest: ``seq`` can never be answered.
        """
        vocab_size = self._model.vocab_size
        if not seq.token_ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        check_prompt_length(len(seq.token_ids), self.max_total_tokens, seq.params)
        if not seq.is_prompt_checked:
            check_token_ids("prompt", seq.token_ids, vocab_size)
            seq.is_prompt_checked = True
        check_params(seq.params, vocab_size, has_text=self._backend is not None)
        if seq.params.grammar is not None and seq.grammar_state is None:
            if self._grammars is None:
                raise InvalidRequest("a grammar needs a tokenizer", "grammar")
            self._grammars.check(seq.params.grammar)
        ending = self._ending_token_ids(seq.params)
        allowed = self._allowed(seq)
        can_only_end = allowed.are_among(ending) if allowed else len(ending) >= vocab_size
        if seq.params.min_tokens and can_only_end:
            raise InvalidRequest("min_tokens leaves no token to choose", "min_tokens")

    def make(self, seq: Sequence) -> SequenceDecoder:
        """The decoder of a sequence that was checked before; starts its grammar if it has one."""
        params, model = seq.params, self._model
        eos, ending = self._eos_token_ids(params), self._ending_token_ids(params)
        logits_processor = None
        if params.needs_logits_processor:
            if seq.seen_tokens is None:
                seq.seen_tokens = seen_tokens(params, seq.token_ids)
            allowed = self._allowed(seq)
            logits_processor = LogitsProcessor(
                params, seq.seen_tokens, ending, model.vocab_size, model.device, allowed
            )
        detokenizer = None
        if self._backend is not None:
            detokenizer = Detokenizer(self._backend, params, seq.token_ids)
        if params.grammar is not None and seq.grammar_state is None:
            assert self._grammars is not None
            seq.grammar_state = self._grammars.state(params.grammar)
        scorer = None if params.prompt_logprobs is None else PromptScorer(seq)
        return SequenceDecoder(
            seq, ending, ending - eos, detokenizer, logits_processor, seq.grammar_state, scorer
        )

    def _allowed(self, seq: Sequence) -> AllowedTokens | None:
        """The tokens a sequence may contain; ``None`` allows all.

        Raises:
            InvalidRequest: one is not in the vocabulary.
        """
        if len(seq.params.allowed_token_ids) and seq.allowed_tokens is None:
            token_ids, vocab_size = seq.params.allowed_token_ids, self._model.vocab_size
            seq.allowed_tokens = AllowedTokens(token_ids, vocab_size)
        return cast("AllowedTokens | None", seq.allowed_tokens)

    def _ending_token_ids(self, params: SamplingParams) -> frozenset[int]:
        # equal integers of PyTorch have different hashes
        return self._eos_token_ids(params) | frozenset(map(index, params.stop_token_ids))

    def _eos_token_ids(self, params: SamplingParams) -> frozenset[int]:
        is_eos_ignored = params.ignore_eos and params.grammar is None
        return frozenset() if is_eos_ignored else self._model.eos_token_ids

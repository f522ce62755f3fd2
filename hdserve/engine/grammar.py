"""Structured output: which tokens a grammar allows after those that were chosen."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from hdserve.engine.grammar_trial import MAX_CPU_S, compiles_in_time, parser_limits
from hdserve.engine.tokenizer import Tokenizer
from hdserve.errors import InvalidRequest, Unsupported
from hdserve.grammar import spells, unforced, with_marks

logger = logging.getLogger(__name__)

_MAX_KEPT = 32
_MAX_REASON_CHARACTERS = 200


class Grammars:
    """Compiles grammars for one model and keeps those used last; thread-safe.

    Compiling takes up to two seconds, and as long before it to try whether it does, so it is done
    in a thread that prepares requests, one grammar at a time: the other cores are the model's, and
    what many ask for at once is compiled once.  What took longer is not tried again.

    All texts of a grammar share the states of its lexer, of which there is a bound: one that has
    reached it follows no text any more, so it is given up, and compiled again when it is asked for.

    Args:
        step_fuel: most work of the lexer for one token, in the library's unit of about 0.1 us.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        ending_token_ids: Iterable[int],
        step_fuel: int = 200_000,
    ) -> None:
        self._vocab_size = vocab_size
        self._step_fuel = step_fuel
        self._backend = tokenizer.backend
        self._special_tokens = _special_tokens(tokenizer)
        self._tokenizer = _make_tokenizer(tokenizer, vocab_size, ending_token_ids)
        self._limits = parser_limits(step_fuel)
        self._found: OrderedDict[str, LLMatcher | InvalidRequest] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def is_known(self, grammar: str) -> bool:
        """Whether it is compiled, or refused, without waiting."""
        return self._known(grammar) is not None

    def check(self, grammar: str) -> None:
        """Compile ``grammar`` (:mod:`hdserve.grammar`) and keep it.

        Raises:
            InvalidRequest: it is wrong, too large, or uses what is not supported; says what.
            Unsupported: the bytes of this model's tokens are not known.
        """
        self._matcher(grammar)

    def state(self, grammar: str) -> GrammarState:
        """The beginning of a text of ``grammar``.

        Raises:
            InvalidRequest, Unsupported: as ``check``.
        """
        matcher = self._matcher(grammar)
        give_up = partial(self._give_up, grammar, matcher)
        return GrammarState(matcher.deep_copy(), self._vocab_size, give_up)

    def _matcher(self, grammar: str) -> LLMatcher:
        found = self._known(grammar)
        if found is None:
            with self._compiling:
                found = self._known(grammar) or self._compile(grammar)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(found.message, found.param)
        return found

    def _known(self, grammar: str) -> LLMatcher | InvalidRequest | None:
        with self._lock:
            if grammar in self._found:
                self._found.move_to_end(grammar)
            return self._found.get(grammar)

    def _compile(self, grammar: str) -> LLMatcher | InvalidRequest:
        if self._tokenizer is None:
            raise Unsupported("structured output is not supported for this tokenizer", "grammar")
        found: LLMatcher | InvalidRequest
        if compiles_in_time(with_marks(grammar, lambda _: None), self._step_fuel):
            form = with_marks(grammar, self._special_token_id)
            if any(spells(form, text) for text in self._special_tokens):
                form = unforced(form)
            found = LLMatcher(self._tokenizer, form, log_level=0, limits=self._limits)
            if found.is_error():
                reason = f"the grammar cannot be used: {_reason(found)}"
                found = InvalidRequest(reason, "grammar")
            else:
                # What the first token takes, up to a second, all texts share: the engine's thread
                # does without.
                found.deep_copy().compute_bitmask()
        else:
            reason = f"the grammar is too complex: it takes over {MAX_CPU_S} s to compile"
            found = InvalidRequest(reason, "grammar")
        with self._lock:
            self._found[grammar] = found
            if len(self._found) > _MAX_KEPT:
                self._found.popitem(last=False)
        return found

    def _give_up(self, grammar: str, matcher: LLMatcher) -> None:
        """``matcher`` has failed; those who follow it now fail with it."""
        with self._lock:
            if self._found.get(grammar) is matcher:
                del self._found[grammar]

    def _special_token_id(self, text: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(text)
        if token_id is None or self._tokenizer is None:
            return None
        return token_id if self._tokenizer.is_special_token(token_id) else None


class GrammarState:
    """How far one sequence has come in its grammar.

    The verifier asks for choices along one path from the root of a draft tree, and every choice
    becomes part of the sequence, so the state only ever moves on: a draft costs no copy and no
    way back, and nodes that are not visited cost nothing.

    Args:
        on_failure: called when the grammar cannot be followed any more.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._on_failure = on_failure

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """``[1, vocab_size]``: ``logits`` with what the grammar forbids at minus infinity."""
        if self._matcher.is_stopped():
            return logits
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        bits = np.unpackbits(words, count=self._vocab_size, bitorder="little")
        is_forbidden = torch.from_numpy(bits == 0).to(logits.device)
        return logits.masked_fill(is_forbidden, -torch.inf)

    def push(self, token_id: int) -> None:
        """``token_id`` was chosen."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
            self._check()

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> InvalidRequest | None:
        """Why the grammar cannot be followed any more: it needs too much time or memory."""
        if not self._matcher.is_error():
            return None
        return InvalidRequest(f"the grammar is too complex: {_reason(self._matcher)}", "grammar")

    def _check(self) -> None:
        if self._matcher.is_error():
            self._on_failure()


def _special_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    added = tokenizer.backend.get_added_tokens_decoder().values()
    return tuple(token.content for token in added if token.special)


def _make_tokenizer(
    tokenizer: Tokenizer, vocab_size: int, ending_token_ids: Iterable[int]
) -> LLTokenizer | None:
    try:
        return LLTokenizer(
            tokenizer.backend.to_str(),
            n_vocab=max(vocab_size, tokenizer.vocab_size),
            eos_token=sorted(ending_token_ids) or tokenizer.eos_token_id,
        )
    except Exception as error:  # the library raises nothing more specific
        logger.warning("no structured output with this tokenizer: %s", error)
        return None


def _reason(matcher: LLMatcher) -> str:
    """What the library complains of, in one line."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    return " ".join(text.split())[:_MAX_REASON_CHARACTERS]

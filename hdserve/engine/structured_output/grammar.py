"""Structured output: which tokens a grammar allows after those already chosen."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from hdserve.engine.structured_output.guide import GrammarGuide
from hdserve.engine.structured_output.trial import (
    MAX_CPU_S,
    MAX_KEPT_BYTES,
    memory_bytes,
    parser_limits,
)
from hdserve.engine.tokenization.tokenizer import Tokenizer
from hdserve.errors import GrammarsOverloaded, InvalidRequest, Unsupported
from hdserve.grammar import spells_any, unforced, with_marks

logger = logging.getLogger(__name__)

_MAX_KEPT = 32
_MAX_HELD_BYTES = 2**30
"""The most memory of the grammars of all texts that are written, and of those kept.  What the
lexers learn while texts are written comes on top, 40 MB each at most."""

_MAX_REASON_CHARACTERS = 200
_LARGE_BYTES = 2**23
"""Smaller ones give no room: what is measured of them is mostly that of the library itself."""

_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_PANIC = re.compile(r"\bpanic: .*", re.DOTALL)
_QUOTED_RULES = re.compile(r"\n *\d+ \| ")
_LEXER_IS_FULL = "too many states"
_MAX_RENEWAL_S = 0.1
"""Grammars that take longer are not compiled in the engine's thread, where everybody waits."""

_NUM_TOKENS_OF_A_MASK = 500
"""How many tokens of a text are read again between two masks, each of which renews the lexer's
budget; some microseconds each."""

_MAX_RENEWALS = 4
"""How often one text may get a fresh lexer because its own is full."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Compiled:
    """A compiled grammar, with a matcher at the beginning of a text.

    Attributes:
        form: what it was compiled from.
        cpu_s: the processor time that took.
        matcher_bytes: memory of a matcher.
        guide: a second matcher, with its own lexer, for drafts; ``None`` if compiling took long.
    """

    matcher: LLMatcher
    form: str
    cpu_s: float
    matcher_bytes: int
    guide: LLMatcher | None = None

    @property
    def num_bytes(self) -> int:
        """All its memory."""
        num_matchers = 1 if self.guide is None else 2
        return num_matchers * self.matcher_bytes + sys.getsizeof(self.form)


_Found = _Compiled | InvalidRequest


class Grammars:
    """Compiles grammars for one model and keeps those used last; thread-safe.

    Compiling takes up to two seconds, after a trial that takes as long, so it is done in a thread
    that prepares requests, one grammar at a time: the other cores are the model's, and a grammar
    that many ask for at once is compiled once.  What took too long is not tried again.

    All texts of a grammar share the states of its lexer, whose number is limited.  A lexer at the
    limit can follow no text, so it is given up, and the grammar is compiled again: for later
    requests, and for the texts that use it now if compiling is quick.

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
        self._tokenizer = _make_tokenizer(tokenizer, vocab_size, ending_token_ids)
        self._special_tokens = _special_tokens(tokenizer, self._tokenizer, vocab_size)
        self._limits = parser_limits(step_fuel)
        self._found: OrderedDict[str, tuple[_Found, int]] = OrderedDict()
        """What is kept, with its bytes."""
        self._kept_bytes = 0
        self._held = WeakValueDictionary[str, _Compiled]()
        """All that exist, in ``_found`` or in the states of texts."""
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def is_known(self, grammar: str) -> bool:
        """Whether the result, a compiled grammar or a refusal, is available without waiting."""
        return self._known(grammar) is not None

    def check(self, grammar: str) -> None:
        """Compile ``grammar`` (:mod:`hdserve.grammar`) and keep it.

        Raises:
            InvalidRequest: it is wrong, too large, or not supported; the message says which.
            GrammarsOverloaded: it is new, and those of the texts that are written take too much
                memory.
            Unsupported: the bytes of this model's tokens are not known.
        """
        self._compiled(grammar)

    def state(self, grammar: str) -> GrammarState:
        """The state before the first token of a text of ``grammar``.

        Raises:
            InvalidRequest, GrammarsOverloaded, Unsupported: as ``check``.
        """
        return GrammarState(self, grammar, self._compiled(grammar), self._vocab_size)

    def renewed(self, grammar: str, failed: _Compiled) -> _Compiled | None:
        """A replacement for ``failed``, whose lexer is full; ``None`` if none is available and it
        would take long to compile.

        Args:
            failed: was given up.
        """
        found = self._known(grammar)
        if found is None and failed.cpu_s <= _MAX_RENEWAL_S:
            again = self._compile_form(failed.form, failed.matcher_bytes)
            if isinstance(again, _Compiled):
                again = replace(again, guide=failed.guide)
            found = self._keep(grammar, again)
        return None if isinstance(found, InvalidRequest) else found

    def give_up(self, grammar: str, failed: _Compiled) -> None:
        """Use ``failed`` for no further text."""
        with self._lock:
            if self._held.get(grammar) is failed:
                del self._held[grammar]
            if grammar in self._found and self._found[grammar][0] is failed:
                self._drop(grammar)

    def _compiled(self, grammar: str) -> _Compiled:
        found = self._known(grammar)
        if found is None:
            with self._compiling:
                found = self._known(grammar) or self._keep(grammar, self._compile(grammar))
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(found.message, found.param)
        return found

    def _known(self, grammar: str) -> _Found | None:
        with self._lock:
            if grammar not in self._found:
                return self._held.get(grammar)
            self._found.move_to_end(grammar)
            return self._found[grammar][0]

    def _compile(self, grammar: str) -> _Found:
        if self._tokenizer is None:
            raise Unsupported("structured output is not supported for this tokenizer", "grammar")
        self._make_room()
        num_bytes = memory_bytes(with_marks(grammar, lambda _: None), self._step_fuel)
        if num_bytes is None:
            return _too_complex(f"it takes over {MAX_CPU_S} s to compile")
        if num_bytes > MAX_KEPT_BYTES:
            return _too_complex(f"it takes over {MAX_KEPT_BYTES >> 20} MB")
        form = with_marks(grammar, self._special_token_id, self._tokenizer.eos_tokens)
        if spells_any(form, self._special_tokens):
            form = unforced(form)
        return self._with_guide(self._compile_form(form, num_bytes))

    def _make_room(self) -> None:
        """Give up what takes much memory and is used by no text, if a further grammar needs it."""
        with self._lock:
            large = [text for text, (_, size) in self._found.items() if size >= _LARGE_BYTES]
            while large and self._held_bytes >= _MAX_HELD_BYTES:
                self._drop(large.pop(0))
            if self._held_bytes >= _MAX_HELD_BYTES:
                raise GrammarsOverloaded(
                    "the grammars of running requests take too much memory for a new one; "
                    "try again later"
                )

    @property
    def _held_bytes(self) -> int:
        held = (reference() for reference in self._held.valuerefs())
        return sum(each.num_bytes for each in held if each is not None)

    def _keep(self, grammar: str, found: _Found) -> _Found:
        size = sys.getsizeof(grammar)
        with self._lock:
            if grammar in self._found:
                self._drop(grammar)
            if isinstance(found, _Compiled):
                self._held[grammar] = found
                size += found.num_bytes
            self._found[grammar] = found, size
            self._kept_bytes += size
            while len(self._found) > _MAX_KEPT or (
                self._kept_bytes > MAX_KEPT_BYTES and len(self._found) > 1
            ):
                self._drop(next(iter(self._found)))
        return found

    def _drop(self, grammar: str) -> None:
        """Keep it no longer; texts go on with it.  Call with the lock held."""
        self._kept_bytes -= self._found.pop(grammar)[1]

    def _compile_form(self, form: str, num_bytes: int) -> _Found:
        """Compile, and compute the work of the first token, up to a second, which all texts share,
        so that the engine's thread need not.

        Args:
            num_bytes: how much memory it keeps.
        """
        assert self._tokenizer is not None
        begin_s = time.thread_time()
        found = LLMatcher(self._tokenizer, form, log_level=0, limits=self._limits)
        trial = found.deep_copy()
        if not found.is_error():
            trial.compute_bitmask()
        if not trial.is_error():
            return _Compiled(found, form, time.thread_time() - begin_s, num_bytes)
        return InvalidRequest(f"the grammar cannot be used: {_reason(trial)}", "grammar")

    def _with_guide(self, found: _Found) -> _Found:
        """Add a second matcher that guides drafts, if the grammar compiles quickly; it is the same
        grammar, so no trial is needed."""
        if isinstance(found, InvalidRequest) or found.cpu_s > _MAX_RENEWAL_S:
            return found
        again = self._compile_form(found.form, found.matcher_bytes)
        return found if isinstance(again, InvalidRequest) else replace(found, guide=again.matcher)

    def _special_token_id(self, text: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(text)
        if token_id is None or token_id >= self._vocab_size or self._tokenizer is None:
            return None
        return token_id if self._tokenizer.is_special_token(token_id) else None


class GrammarState:
    """How far one sequence has come in its grammar.

    The verifier asks for choices along one path from the root of a draft tree, and every choice
    becomes part of the sequence, so the state only moves forward: drafts need no copy and no
    rollback, and nodes that are not visited cost nothing.

    Args:
        grammars: the compiler it came from.

    Attributes:
        guide: tells drafts what the grammar allows next; ``None`` if they do without.
    """

    def __init__(
        self, grammars: Grammars, grammar: str, compiled: _Compiled, vocab_size: int
    ) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self.guide: GrammarGuide | None = None
        if compiled.guide is not None:
            self.guide = GrammarGuide(compiled.guide.deep_copy(), vocab_size)
        self._vocab_size = vocab_size
        self._token_ids: list[int] = []
        self._num_renewals = 0

    def give_up_guide(self) -> None:
        """Drop the guide; later texts get one whose lexer is not full."""
        self.guide = None
        self._grammars.give_up(self._grammar, self._compiled)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """``[1, vocab_size]``: ``logits``, with forbidden tokens at minus infinity."""
        if self._matcher.is_stopped():
            return logits
        mask = self._matcher.compute_bitmask()
        while self._renew():
            mask = self._matcher.compute_bitmask()
        words = np.frombuffer(mask, np.uint8)
        bits = np.unpackbits(words, count=self._vocab_size, bitorder="little")
        is_forbidden = torch.from_numpy(bits == 0).to(logits.device)
        return logits.masked_fill(is_forbidden, -torch.inf)

    def push(self, token_id: int) -> None:
        """Advance by ``token_id``, which was chosen."""
        if not self._matcher.is_stopped():
            self._token_ids.append(token_id)
            self._matcher.consume_token(token_id)
            while self._renew():
                pass

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing further."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> InvalidRequest | None:
        """Why the grammar cannot be followed any more: it needs too much time or memory."""
        if not self._matcher.is_error():
            return None
        return _too_complex(_reason(self._matcher))

    def _renew(self) -> bool:
        """Replace the matcher if it has failed because its lexer is full; whether it was replaced,
        by one that may have failed too."""
        if not self._matcher.is_error():
            return False
        self._grammars.give_up(self._grammar, self._compiled)
        is_full = _LEXER_IS_FULL in self._matcher.get_error()
        if not is_full or self._num_renewals == _MAX_RENEWALS:
            return False
        self._num_renewals += 1
        compiled = self._grammars.renewed(self._grammar, self._compiled)
        if compiled is None:
            return False
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._read_again()
        return True

    def _read_again(self) -> None:
        """Read the text again from its beginning.  Computing a mask renews the lexer's budget."""
        for begin in range(0, len(self._token_ids), _NUM_TOKENS_OF_A_MASK):
            if self._matcher.is_stopped():
                return
            if begin > 0:
                self._matcher.compute_bitmask()
            self._matcher.consume_tokens(self._token_ids[begin : begin + _NUM_TOKENS_OF_A_MASK])


def _too_complex(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar is too complex: {reason}", "grammar")


def _special_tokens(
    tokenizer: Tokenizer, known: LLTokenizer | None, vocab_size: int
) -> tuple[str, ...]:
    """The texts of tokens that llguidance takes for no text, some of which are in a text, or that
    the model lacks."""
    added = tokenizer.backend.get_added_tokens_decoder().items()
    return tuple(
        token.content
        for token_id, token in added
        if token.special
        or token_id >= vocab_size
        or (known is not None and known.is_special_token(token_id))
    )


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
    """The library's complaint in one line, without the rules that it quotes, which the client has
    not written."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    text = _PANIC.sub("it cannot be compiled", text)
    text = _QUOTED_RULES.split(_PLACE.sub("", text))[0]
    return " ".join(text.split())[:_MAX_REASON_CHARACTERS]

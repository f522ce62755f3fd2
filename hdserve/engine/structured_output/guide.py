"""Which tokens the grammar of one answer allows next, for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from hdserve.tree import DraftTree


class GrammarGuide:
    """Follows one text, next to the
    :class:`~hdserve.engine.structured_output.grammar.GrammarState` that chooses.

    The two share nothing: not the matcher, whose errors are permanent, nor its lexer.  Reading
    guesses adds lexer states and uses up lexer work, both of which are limited, and a grammar that
    reaches a limit ends its text.  With one lexer for both, 16 guesses of 16 tokens before each
    token ended texts that would not have ended otherwise, and filled the lexer three times in 400
    tokens.

    Args:
        matcher: an ``LLMatcher`` that has read nothing, whose lexer no ``GrammarState`` uses.
        vocab_size: the model's, which may lack tokens of the tokenizer.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_read = 0
        self._mask = b""

    def follow(self, token_ids: Sequence[int], begin: int = 0) -> None:
        """Read the new tokens of the output, which is ``token_ids`` from ``begin`` on.

        Then compute the mask there, which renews the lexer's work limit for the guesses that are
        read next, so that these are bounded too.

        Raises:
            RuntimeError: the grammar cannot be followed any further.
        """
        new = token_ids[begin + self._num_read :]
        self._num_read += len(new)
        if new:
            self._matcher.consume_tokens([*new])
        self._mask = self._matcher.compute_bitmask()
        self._check()

    def forced(self) -> list[int]:
        """The next tokens, as long as the grammar allows only one, and the model has it."""
        found: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        return [*takewhile(lambda token_id: token_id < self._vocab_size, found)]

    def allowed(self, tree: DraftTree, num_certain: int) -> list[bool]:
        """Which nodes of ``tree`` the grammar allows; ``tree`` begins with ``num_certain`` nodes of
        forced tokens.

        Each path is read once, up to its first token that is not allowed.
        """
        paths = self._paths_to_read(tree, num_certain)
        num_allowed = [0] * len(tree)
        found = [node <= num_certain for node in range(len(tree))]
        for node in range(len(tree) - 1, num_certain, -1):
            path, parent = paths[node], tree.parents[node]
            if path is None:
                continue
            if not num_allowed[node]:  # its descendants were not read
                num_allowed[node] = self._matcher.validate_tokens(path)
            num_allowed[parent] = max(num_allowed[parent], num_allowed[node])
            found[node] = num_allowed[node] >= tree.depths[node]
        self._check()
        return found

    def _paths_to_read(self, tree: DraftTree, num_certain: int) -> list[list[int] | None]:
        """The tokens up to each node; ``None`` for nodes whose first token is not allowed next, or
        that branch off the forced tokens."""
        token_ids, parents = tree.token_ids, tree.parents
        found: list[list[int] | None] = [None] * num_certain
        found.append(token_ids[1 : num_certain + 1])
        for node in range(num_certain + 1, len(tree)):
            before, token_id = found[parents[node]], token_ids[node]
            may_be = before is not None and (before or self._may_be_next(token_id))
            found.append([*before, token_id] if before is not None and may_be else None)
        return found

    def _may_be_next(self, token_id: int) -> bool:
        return bool(self._mask[token_id >> 3] >> (token_id & 7) & 1)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error())

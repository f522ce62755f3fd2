"""What the grammar of one answer leaves open of its next tokens, for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hdserve.tree import DraftTree


class GrammarGuide:
    """Follows one text, beside the :class:`~hdserve.engine.grammar.GrammarState` that chooses.

    The two share nothing: not the matcher, whose errors stay, and not its lexer either.  Whatever
    reads a guess adds states to the lexer and takes of its work, of both of which there is a bound,
    and a grammar that reaches one ends its text.  With a lexer for both, 16 guesses of 16 tokens
    before each token ended texts that had not ended without, and filled it three times in 400
    tokens.

    Args:
        matcher: an ``LLMatcher`` that has read nothing, of a lexer that no ``GrammarState`` has.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._num_read = 0
        self._mask = b""

    def follow(self, token_ids: Sequence[int], begin: int = 0) -> None:
        """Read what the output, which is ``token_ids`` from ``begin`` on, has more than before.

        The mask that is made then is that of the place; it gives the lexer new work for the guesses
        that are read there, so that they are bounded, too.

        Raises:
            RuntimeError: the grammar cannot be followed any more.
        """
        new = token_ids[begin + self._num_read :]
        self._num_read += len(new)
        if new:
            self._matcher.consume_tokens([*new])
        self._mask = self._matcher.compute_bitmask()
        self._check()

    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice of them."""
        found: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        return found

    def allowed(self, tree: DraftTree, num_certain: int) -> list[bool]:
        """Which nodes of ``tree`` the grammar lets come; ``tree`` begins with ``num_certain`` nodes
        of the tokens that are forced.

        Each path is read once, to its first token that is not allowed.
        """
        paths = self._paths_to_read(tree, num_certain)
        num_allowed = [0] * len(tree)
        found = [node <= num_certain for node in range(len(tree))]
        for node in range(len(tree) - 1, num_certain, -1):
            path, parent = paths[node], tree.parents[node]
            if path is None:
                continue
            if not num_allowed[node]:  # nothing that hangs on it was read
                num_allowed[node] = self._matcher.validate_tokens(path)
            num_allowed[parent] = max(num_allowed[parent], num_allowed[node])
            found[node] = num_allowed[node] >= tree.depths[node]
        self._check()
        return found

    def _paths_to_read(self, tree: DraftTree, num_certain: int) -> list[list[int] | None]:
        """The tokens up to each node; ``None`` for those whose first token may not be the next, and
        those that leave what is forced."""
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

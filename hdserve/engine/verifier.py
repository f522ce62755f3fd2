"""The verification rule: follow the model's choices while the tree contains them."""

from __future__ import annotations

from collections.abc import Callable

from hdserve.tree import Acceptance, DraftTree


def verify(tree: DraftTree, choose: Callable[[int], int]) -> Acceptance:
    """Walk from the root along the model's own choices.

    The first choice that is not in the tree is the bonus token.  The rule never asks where a draft
    came from and needs no draft probabilities; with ``choose`` a function of the tokens on the
    path, the seed and the position alone, the result is what decoding one token at a time gives.

    Args:
        tree: the verified guesses.
        choose: the token the model puts after a node.  Called once per node of the accepted path,
            in order from the root.
    """
    path, token_ids = [0], []
    while True:
        token_id = choose(path[-1])
        token_ids.append(token_id)
        child = tree.child(path[-1], token_id)
        if child is None:
            return Acceptance(path, token_ids)
        path.append(child)

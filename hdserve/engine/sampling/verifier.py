"""The verification rule: follow the model's choices while the tree contains them."""

from __future__ import annotations

from collections.abc import Callable

from hdserve.engine.faults import NoToken
from hdserve.tree import Acceptance, DraftTree


def verify(tree: DraftTree, choose: Callable[[int], int]) -> Acceptance:
    """Walk from the root along the model's own choices.

    The first choice that is not in the tree is the bonus token.  The rule never asks where a draft
    came from and needs no draft probabilities; with ``choose`` a function of only the path's
    tokens, the seed and the position, the result is what decoding one token at a time gives.

    If no token can be chosen below the root, the walk ends one node earlier: the sequence may end
    with the last accepted token, and if it does not, the next step fails at its root.

    Args:
        tree: the verified guesses.
        choose: the token the model puts after a node.  Called once per node of the accepted path,
            in order from the root.

    Raises:
        NoToken: at the root.
    """
    path, token_ids = [0], list[int]()
    while True:
        try:
            token_id = choose(path[-1])
        except NoToken:
            if not token_ids:
                raise
            return Acceptance(path[:-1], token_ids)
        token_ids.append(token_id)
        child = tree.child(path[-1], token_id)
        if child is None:
            return Acceptance(path, token_ids)
        path.append(child)

"""What a forward gives for the nodes of the draft trees it verified."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hdserve.engine.sampling.topk import Found, find_tokens


class TopTokens:
    """The likeliest tokens after the nodes of a forward, computed at the first request for all
    sequences at once.

    Args:
        logits: ``[num_rows, vocab_size]``.
        num_nodes: the first rows are theirs.
        num_at_once: how many are computed if fewer are asked for.
        found: some of them, if already known: tokens and their logits.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        num_nodes: int,
        num_at_once: int = 1,
        found: Found | None = None,
    ) -> None:
        self._logits = logits
        self._num_nodes = num_nodes
        self._num_at_once = num_at_once
        self._found = found
        self._likeliest: tuple[list[int], list[float]] | None = None

    def __call__(self, k: int) -> Found:
        """Tokens and their logits, two arrays ``[num_nodes, k]``, likeliest first."""
        found = self._at_least(k)
        return found if found[0].shape[1] == k else (found[0][:, :k], found[1][:, :k])

    @property
    def likeliest(self) -> tuple[list[int], list[float]]:
        """The likeliest token after every node and its logit."""
        if self._likeliest is None:
            tokens, logits = self._at_least(1)
            self._likeliest = tokens[:, 0].tolist(), logits[:, 0].tolist()
        return self._likeliest

    def _at_least(self, k: int) -> Found:
        found = self._found
        if found is None or k > found[0].shape[1]:
            number = max(k, min(self._num_at_once, self._logits.shape[1]))
            self._found = found = find_tokens(self._logits, self._num_nodes, number)
        return found


class NodeOutputs(NamedTuple):
    """What a forward gives for the nodes of one tree; the ``Forward`` that drafters see.

    Attributes:
        of_forward: the logits of the whole forward, ``[num_rows, vocab_size]`` float32, or bfloat16
            as the model gives them.
        top: of the whole forward.
        rows: those of the tree's nodes in the forward.
        drawn: the token drawn after every node, :data:`~hdserve.engine.kernels.draw.NO_TOKEN` if
            there is none; ``None`` if the choice at a node is made when the walk reaches it.
        hidden_states: ``[num_nodes, hidden_size]`` in the model's dtype, if a drafter needs them.
        prompt_logits: ``[num_scored_tokens, vocab_size]`` float32, for a chunk with scored tokens;
            else ``None``.
    """

    of_forward: torch.Tensor
    top: TopTokens
    rows: slice
    drawn: list[int] | None = None
    hidden_states: torch.Tensor | None = None
    prompt_logits: torch.Tensor | None = None

    @property
    def logits(self) -> torch.Tensor:
        """``[num_nodes, vocab_size]``, in the order of the tree's nodes."""
        return self.of_forward[self.rows]

    def top_tokens(self, k: int) -> Found:
        """The ``k`` likeliest next tokens after every node and their logits, two arrays
        ``[num_nodes, k]``."""
        tokens, logits = self.top(k)
        return tokens[self.rows], logits[self.rows]

    def likeliest(self) -> tuple[list[int], list[float]]:
        """The likeliest next token after every node and its logit."""
        tokens, logits = self.top.likeliest
        return tokens[self.rows], logits[self.rows]

    def hidden(self, node: int) -> torch.Tensor:
        """The last hidden state of ``node``, ``[hidden_size]``."""
        assert self.hidden_states is not None, "no drafter asked for hidden states"
        return self.hidden_states[node]

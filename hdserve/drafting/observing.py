"""Learning from a decided step: one compiled call for all its requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hdserve.databases.compiled import jit
from hdserve.databases.ngram import NUM_ADDED, Ints
from hdserve.drafting.arrays import (
    NUM_STEP_FIELDS,
    STATE_NUM_TOKENS,
    STEP_DATABASES,
    STEP_LEARNED,
    STEP_LEVELS,
    STEP_NUM_ADDED,
    STEP_NUM_LEARNED,
    STEP_NUM_NEW,
    STEP_NUM_NODES,
    STEP_STAMP,
)
from hdserve.drafting.base import Verified
from hdserve.drafting.handles import databases_of, learned_of, scratch_of
from hdserve.drafting.hierarchy_request import HierarchyRequest
from hdserve.drafting.learning import commit
from hdserve.drafting.recycling import Logits, recycle


class DecidedStep:
    """What a step decided, request by request.

    Args:
        num_top: how many of the likeliest tokens after a node are kept.
    """

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._num_requests = 0
        self._decided: list[int] = []
        self._token_ids: list[int] = []
        self._tree_token_ids: list[int] = []
        self._tree_parents: list[int] = []
        self._top_tokens: list[npt.NDArray[np.int64]] = []
        self._top_logits: list[Logits] = []

    def add(
        self,
        request: HierarchyRequest,
        one: Verified,
        num_learned: int,
        num_kept: int,
    ) -> None:
        """Append the chosen tokens to the text of ``request``, and learn from the last
        ``num_learned`` of them.

        Args:
            num_kept: after how many nodes the likeliest tokens are kept, all of the tree or none.
        """
        num_nodes = stamp = 0
        recycled = request.sources.recycled
        if num_kept and recycled is not None:
            assert one.forward is not None, "it was read"
            num_nodes, stamp = num_kept, recycled.table.stamp
            self._tree_token_ids += one.tree.token_ids
            self._tree_parents += one.tree.parents
            tokens, logits = one.forward.top_tokens(self._num_top)
            self._top_tokens.append(tokens)
            self._top_logits.append(logits)
        token_ids = one.acceptance.token_ids
        self._num_requests += 1
        self._token_ids += token_ids
        addresses = request.handles.address, request.calibration.handles.address
        numbers = len(token_ids), num_learned, num_nodes, stamp, 0
        self._decided += (*addresses, request.levels, *numbers)

    def learn(self, scratch_handles: int, rate: float, bias_rate: float) -> list[int]:
        """Do all this; returns the number of contexts in the table of each request."""
        trees = self._tree_token_ids + self._tree_parents
        numbers = np.array(self._decided + self._token_ids + trees, np.int64)
        end = self._num_requests * NUM_STEP_FIELDS
        observe_step(
            numbers,
            self._num_requests,
            len(self._token_ids),
            _joined(self._top_tokens, self._num_top, np.int64),
            _joined(self._top_logits, self._num_top, np.float32),
            scratch_handles,
            rate,
            bias_rate,
        )
        num_added: list[int] = numbers[STEP_NUM_ADDED:end:NUM_STEP_FIELDS].tolist()
        return num_added


def _joined(arrays: list[npt.NDArray[Any]], num_columns: int, dtype: type) -> npt.NDArray[Any]:
    """One array, row after row; copied only if there are several."""
    if len(arrays) > 1:
        return np.concatenate(arrays)
    return np.ascontiguousarray(arrays[0]) if arrays else np.empty((0, num_columns), dtype)


@jit
def observe_step(
    numbers: Ints,
    num_requests: int,
    num_tokens: int,
    top_tokens: Ints,
    top_logits: Logits,
    scratch_handles: int,
    rate: float,
    bias_rate: float,
) -> None:
    """Append decided tokens to the text of each request, learn from them, and keep the likeliest
    tokens.

    Args:
        numbers: for each request :data:`NUM_STEP_FIELDS` fields, see ``STEP_*``, then all new
            tokens, then the nodes whose likeliest tokens are kept: all tokens, then all parents.
        num_tokens: how many new tokens there are.
        top_tokens, top_logits: the likeliest tokens after each of those nodes, ``[nodes, k]``,
            ``k <= NUM_TOP``.
        rate, bias_rate: see :func:`~hdserve.drafting.learning.commit`.
    """
    scratch = scratch_of(scratch_handles)
    token = num_requests * NUM_STEP_FIELDS
    trees = token + num_tokens
    node, num_nodes = 0, len(top_tokens)
    for request in range(num_requests):
        fields = numbers[request * NUM_STEP_FIELDS : (request + 1) * NUM_STEP_FIELDS]
        databases = databases_of(fields[STEP_DATABASES])
        learned = learned_of(fields[STEP_LEARNED])
        root = databases.state[STATE_NUM_TOKENS] - 1
        new_tokens = numbers[token : token + fields[STEP_NUM_NEW]]
        levels, num_learned = fields[STEP_LEVELS], fields[STEP_NUM_LEARNED]
        commit(databases, learned, scratch, levels, new_tokens, num_learned, rate, bias_rate)
        end = node + fields[STEP_NUM_NODES]
        recycle(
            databases,
            scratch,
            numbers[trees + node : trees + end],
            numbers[trees + num_nodes + node : trees + num_nodes + end],
            top_tokens[node:end],
            top_logits[node:end],
            root,
            fields[STEP_STAMP],
        )
        fields[STEP_NUM_ADDED] = databases.context_size[NUM_ADDED]
        token += fields[STEP_NUM_NEW]
        node = end

"""Drafters whose failures end a measurement, and say whose they are."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hdserve.core import Sequence
from hdserve.drafting.base import Drafter
from hdserve.drafting.merging import merge_trees
from hdserve.errors import HdserveError
from hdserve.tree import Acceptance, DraftTree


class NamedDrafters:
    """Calls several drafters as the engine does, but for failures: the engine decodes on without
    the drafter, a measurement would be of something else.

    Every method raises :class:`~hdserve.errors.HdserveError` where a drafter fails.  It names the
    drafter, the call, the request and the line.
    """

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def warm_up(self) -> None:
        for drafter in self._drafters:
            _call(drafter, "warm_up before the first request", drafter.warm_up)

    def start(self, seq: Sequence) -> None:
        for drafter in self._drafters:
            _call(drafter, _of("start", seq), drafter.start, seq)

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        """Fill ``tree``, from several drafters with the likeliest nodes of their own."""
        if len(self._drafters) == 1:
            _call(self._drafters[0], _of("propose", seq), self._drafters[0].propose, seq, tree)
            return
        trees = [tree.empty_copy() for _ in self._drafters]
        for drafter, own in zip(self._drafters, trees, strict=True):
            _call(drafter, _of("propose", seq), drafter.propose, seq, own)
        merge_trees(trees, tree)

    def observe(self, seq: Sequence, tree: DraftTree, acceptance: Acceptance) -> None:
        for drafter in self._drafters:
            _call(drafter, _of("observe", seq), drafter.observe, seq, tree, acceptance, None)

    def finish(self, seq: Sequence) -> None:
        for drafter in self._drafters:
            _call(drafter, _of("finish", seq), drafter.finish, seq)


def _of(call: str, seq: Sequence) -> str:
    return f"{call} of request {seq.request_id}"


def _call(drafter: Drafter, doing: str, function: Callable[..., None], *arguments: Any) -> None:
    try:
        function(*arguments)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        raise HdserveError(f"drafter {drafter.name} failed in {doing}: {reason}") from error

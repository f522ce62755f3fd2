"""Drafters whose failures end a measurement with the name of the drafter."""

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
    """Calls several drafters as the engine does, except for failures: the engine would go on
    without the drafter, so something else would be measured.

    Every method raises :class:`~hdserve.errors.HdserveError` if a drafter fails.  It names the
    drafter, the call, the request and the line.
    """

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def warm_up(self) -> None:
        for drafter in self._drafters:
            _call(drafter, "warm_up", drafter.warm_up)

    def start(self, seq: Sequence) -> None:
        for drafter in self._drafters:
            _call(drafter, "start", drafter.start, seq)

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        """Fill ``tree``; with several drafters, with the likeliest nodes of their trees."""
        if len(self._drafters) == 1:
            drafter = self._drafters[0]
            _call(drafter, "propose", drafter.propose, seq, tree)
            return
        trees = [tree.copy() for _ in self._drafters]
        for drafter, own in zip(self._drafters, trees, strict=True):
            _call(drafter, "propose", drafter.propose, seq, own)
        merge_trees(trees, tree)

    def observe(self, seq: Sequence, tree: DraftTree, acceptance: Acceptance) -> None:
        for drafter in self._drafters:
            _call(drafter, "observe", drafter.observe, seq, tree, acceptance, None)

    def finish(self, seq: Sequence) -> None:
        for drafter in self._drafters:
            _call(drafter, "finish", drafter.finish, seq)


def _call(drafter: Drafter, name: str, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function of a drafter, whose first argument is the sequence, if it has arguments; its
    time is measured, so messages are only composed when it fails."""
    try:
        function(*arguments)
    except Exception as error:
        when = f"of request {arguments[0].request_id}" if arguments else "before the first request"
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        doing = f"{name} {when}"
        raise HdserveError(f"drafter {drafter.name} failed in {doing}: {reason}") from error

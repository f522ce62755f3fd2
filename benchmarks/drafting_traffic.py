"""Traffic of several requests at a time, and of requests that come again: docs/results/drafting.md.

    python -m benchmarks.drafting_traffic --data DIR --out var/drafting-traffic.json

*At a time*: requests take their steps in turn, and what one says is counted at once or only when it
has ended.  *Again*: recorded requests were answered before, among others, and come once more with
a share of the answer's tokens replaced, left out or added at random.  ``DIR`` holds
``replay/SET.eval.jsonl.gz`` and ``replay/SET.fill.jsonl.gz``.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hdserve.bench.replay import Replay, ReplayMode
from hdserve.bench.replay_files import ReplayRow, read_replay
from hdserve.bench.replay_setup import ending_token_ids, largest_id
from hdserve.config import DraftingConfig
from hdserve.core import Sequence as RequestSequence
from hdserve.core import Source
from hdserve.databases.model import ModelDatabase
from hdserve.drafting.base import Drafter, DraftResources, Forward
from hdserve.drafting.registry import build_drafters
from hdserve.tree import Acceptance, DraftTree

NUM_AT_A_TIME = 8
NUM_REQUESTS, NUM_SEVERAL, NUM_ANSWERS, ANSWERS_DIFFER = 120, 20, 4, 0.15
NUM_AGAIN = 40
SPEC_BENCH, HERMES, TAU2 = "specbench-vicuna-7b", "tools-hermes-mistral", "tools-tau2-gpt-4.1"
AGAIN = (
    (SPEC_BENCH, 16, (0.0, 0.02, 0.1)),
    (SPEC_BENCH, 60, (0.0,)),
    (HERMES, 16, (0.0, 0.02)),
    (TAU2, 16, (0.0, 0.02)),
    (TAU2, 60, (0.05,)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for result in (*at_a_time(args.data), *again(args.data)):
        results.append(result)
        print(json.dumps(result), flush=True)
        args.out.write_text(json.dumps(results, indent=2) + "\n")


def at_a_time(data: Path) -> Iterator[dict[str, Any]]:
    """Spec-Bench, Hermes, and several answers to the same questions."""
    spec_bench = read(data, SPEC_BENCH, "eval")
    several = [
        replace(row, name=f"{row.name} {number}", response=changed(row, ANSWERS_DIFFER, number))
        for row in spec_bench[:NUM_SEVERAL]
        for number in range(NUM_ANSWERS)
    ]
    for name, rows in (
        (SPEC_BENCH, spec_bench[:NUM_REQUESTS]),
        (HERMES, read(data, HERMES, "eval")[:NUM_REQUESTS]),
        (f"{SPEC_BENCH}, {NUM_ANSWERS} answers each", several),
    ):
        figures = {
            key: mean_acceptance_length(rows, (), 16, database(), concurrency=NUM_AT_A_TIME)
            for key, database in (("when it has ended", _Ended), ("at once", _database))
        }
        yield {"traffic": name, "requests": len(rows), **figures}


def again(data: Path) -> Iterator[dict[str, Any]]:
    """Yield requests that were answered before, by our drafter and by the peers' rule."""
    for name, budget, shares in AGAIN:
        rows = read(data, name, "eval")[:NUM_AGAIN]
        before = [*rows, *read(data, name, "fill")]
        for share in shares:
            repeated = [
                replace(row, response=changed(row, share, number))
                for number, row in enumerate(rows)
            ]
            yield {
                "set": name,
                "budget": budget,
                "changed": share,
                "hierarchy": mean_acceptance_length(repeated, before, budget, _database()),
                "peers' rule": mean_acceptance_length(
                    repeated, before, budget, _database(), LongestMatch(before)
                ),
            }


def read(data: Path, name: str, part: str) -> list[ReplayRow]:
    return list(read_replay(data / "replay" / f"{name}.{part}.jsonl.gz"))


def changed(row: ReplayRow, share: float, seed: int) -> tuple[int, ...]:
    """Return the response with a ``share`` of its tokens replaced, left out or doubled with
    another."""
    rng = np.random.default_rng(seed)
    response: list[int] = []
    for token in row.response:
        other = int(rng.choice(row.response))
        if rng.random() >= share:
            response.append(token)
        else:
            response += ([other], [], [token, other])[rng.integers(3)]
    return tuple(response)


def mean_acceptance_length(
    rows: Sequence[ReplayRow],
    before: Sequence[ReplayRow],
    budget: int,
    database: ModelDatabase,
    drafter: Drafter | None = None,
    concurrency: int = 1,
) -> float:
    """Return that of our drafter with context and model database, or of another one."""
    everything = [*rows, *before]
    resources = DraftResources(
        largest_id(everything) + 1, database, ending_token_ids=ending_token_ids(everything)
    )
    drafters = [drafter] if drafter else build_drafters(DraftingConfig(), resources)
    mode = ReplayMode.WARM if before else ReplayMode.ONLINE
    replay = Replay(drafters, database, mode, budget, None, concurrency)
    replay.fill(before)
    replay.run(rows)
    return round(replay.result.mean_acceptance_length, 3)


def _database() -> ModelDatabase:
    return ModelDatabase()


class _Ended(ModelDatabase):
    """Learns of an output only when it has ended."""

    def record_running(self, sequences: Any) -> None:
        return


class _Text:
    """Tokens that grow, and where each token stands in them."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._tokens = [token for text in texts for token in (*text, -1)]
        self._places: dict[int, list[int]] = {}
        for place, token in enumerate(self._tokens):
            self._places.setdefault(token, []).append(place)

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._places.setdefault(token, []).append(len(self._tokens))
            self._tokens.append(token)

    def longest_match(self, context: Sequence[int], longest: int) -> tuple[int, list[int]]:
        """Return the length of the longest match of the end of ``context``, and the places behind
        it.  Text that ends with ``context`` does not match there, where nothing follows."""
        tokens = self._tokens
        found = [place + 1 for place in self._places.get(context[-1], ())]
        places, length = [place for place in found if place < len(tokens)], 1
        while length < min(longest, len(context)):
            token = context[-1 - length]
            found = [p for p in places if p > length and tokens[p - 1 - length] == token]
            if not found:
                break
            places, length = found, length + 1
        return length, places

    def children(self, places: Sequence[int]) -> dict[int, list[int]]:
        """Return the tokens at ``places``, each with the places behind it."""
        found: dict[int, list[int]] = {}
        for place in places:
            if place < len(self._tokens) and self._tokens[place] >= 0:
                found.setdefault(self._tokens[place], []).append(place + 1)
        return found


class LongestMatch(Drafter):
    """The rule of suffix decoding, as the peers have it: the longest match of up to 12 tokens in
    the request or in all earlier text, and from it a tree, best first by the share of a
    continuation in its parent's.  Of matches of one length that in all text is taken, with which
    more is accepted.

    Args:
        before: requests that were answered before; those that follow are added as they end.
    """

    name = "longest-match"
    MAX_MATCH = 12

    def __init__(self, before: Sequence[ReplayRow]) -> None:
        self._all = _Text([row.response for row in before])
        self._own: dict[str, _Text] = {}

    def start(self, seq: RequestSequence) -> None:
        self._own[seq.request_id] = _Text([])
        self._own[seq.request_id].add(seq.token_ids)

    def propose(self, seq: RequestSequence, tree: DraftTree) -> None:
        texts = (self._own[seq.request_id], self._all)
        matches = [text.longest_match(seq.token_ids, self.MAX_MATCH) for text in texts]
        best = max(
            range(len(texts)), key=lambda which: (bool(matches[which][1]), matches[which][0], which)
        )
        text, (_, places) = texts[best], matches[best]
        heap: list[tuple[float, int, int, list[int]]] = []
        self._push(heap, text, 1.0, 0, places)
        while heap and tree.num_draft_tokens < tree.capacity:
            score, token, parent, places = heapq.heappop(heap)
            if tree.depths[parent] < tree.max_depth:
                node = tree.add_node(parent, token, Source.OTHER, -score)
                self._push(heap, text, -score, node, places)

    @staticmethod
    def _push(
        heap: list[tuple[float, int, int, list[int]]],
        text: _Text,
        score: float,
        parent: int,
        places: Sequence[int],
    ) -> None:
        children = text.children(places)
        total = sum(map(len, children.values()))
        for token, behind in children.items():
            heapq.heappush(heap, (-score * len(behind) / total, token, parent, behind))

    def observe(
        self,
        seq: RequestSequence,
        tree: DraftTree,
        acceptance: Acceptance,
        forward: Forward | None,
    ) -> None:
        self._own[seq.request_id].add(acceptance.token_ids)

    def finish(self, seq: RequestSequence) -> None:
        del self._own[seq.request_id]
        self._all.add([*seq.output_token_ids, -1])


if __name__ == "__main__":
    main()

"""What a server drafted and accepted in a span of time, from its ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "vllm:spec_decode_num_"
_OWN_PREFIX = "hdserve_"
"""Of metrics that only hdserve has."""

COLLECTING_POSITION = 16
"""Where hdserve counts what was accepted there and deeper, which is no share of the drafts."""


@dataclass(frozen=True, slots=True)
class DraftTotals:
    """Counters since the server started, over all its replicas of one model.

    Attributes:
        accepted_by_position: by depth in a draft, from 0; of hdserve's, what is deeper than 15 is
            left out.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_by_position: dict[int, int]

    def since(self, before: DraftTotals) -> DraftTotals:
        """Return the counts since ``before``."""
        earlier = before.accepted_by_position
        return DraftTotals(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            {
                position: count - earlier.get(position, 0)
                for position, count in sorted(self.accepted_by_position.items())
            },
        )

    def as_result(self) -> dict[str, Any]:
        """Return the figures with the keys of ``vllm bench serve``: the rate in percent, the length
        including the bonus token, and the share of drafts by position."""
        if self.num_drafts <= 0 or self.num_draft_tokens <= 0:
            return {}
        by_position = self.accepted_by_position.values()
        return {
            "spec_decode_acceptance_rate": 100 * self.num_accepted_tokens / self.num_draft_tokens,
            "spec_decode_acceptance_length": 1 + self.num_accepted_tokens / self.num_drafts,
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_draft_tokens": self.num_draft_tokens,
            "spec_decode_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_per_position_acceptance_rates": [
                count / self.num_drafts for count in by_position
            ],
        }


def read_draft_totals(text: str, names: Collection[str]) -> DraftTotals | None:
    """Return the counters of the model with one of ``names`` in Prometheus text; ``None`` if the
    server has none of them."""
    counts: Counter[str] = Counter()
    by_position: Counter[int] = Counter()
    families = [*text_string_to_metric_families(text)]
    for family in families:
        name = family.name.removeprefix(_PREFIX)
        for sample in family.samples:
            is_total = family.name.startswith(_PREFIX) and sample.name.endswith("_total")
            if not is_total or sample.labels.get("model_name") not in {None, *names}:
                continue
            if name == "accepted_tokens_per_pos":
                by_position[int(sample.labels["position"])] += int(sample.value)
            else:
                counts[name] += int(sample.value)
    if "drafts" not in counts:
        return None
    if any(family.name.startswith(_OWN_PREFIX) for family in families):
        del by_position[COLLECTING_POSITION]
    return DraftTotals(
        counts["drafts"], counts["draft_tokens"], counts["accepted_tokens"], dict(by_position)
    )

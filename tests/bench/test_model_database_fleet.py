"""The simulation of a fleet against one model database gives what can be computed by hand."""

from __future__ import annotations

import pytest

from actors.model_database import MAX_POLLS_PER_S
from benchmarks.model_database_fleet import OUTPUT_TOKENS, Costs, Fleet, largest_fleet
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.messages import MAX_REPLY_BYTES

CONFIG = ModelDatabaseConfig()
COSTS = Costs(
    publish_s=1e-3, publish_output_s=1e-5, poll_s=5e-4, poll_byte_s=1e-8, output_bytes=400.0
)


def test_an_idle_fleet_only_polls() -> None:
    """At the interval of the configuration, and at the actor's pace when there are many."""
    few = Fleet(COSTS, 10, 0.0, CONFIG).run()
    assert few["calls_per_s"] == pytest.approx(10 / CONFIG.poll_interval_s, rel=0.05)
    assert few["busy"] == pytest.approx(few["calls_per_s"] * COSTS.poll_s, rel=0.01)
    assert few["sent_mb_per_s"] == few["behind_kb"] == 0
    many = Fleet(COSTS, 1000, 0.0, CONFIG).run()
    assert many["calls_per_s"] == pytest.approx(MAX_POLLS_PER_S, rel=0.1)


def test_everybody_gets_what_all_others_publish() -> None:
    """Bytes sent are readers x rate of the others, and the time of each message is counted."""
    size, outputs_per_s = 20, 2.0
    result = Fleet(COSTS, size, outputs_per_s, CONFIG).run()
    sent_per_s = size * (size - 1) * outputs_per_s * COSTS.output_bytes
    assert result["sent_mb_per_s"] == pytest.approx(sent_per_s / 1e6, rel=0.1)
    num_published = size * outputs_per_s
    polls_per_s = size / CONFIG.poll_interval_s
    busy = num_published * (COSTS.publish_s + COSTS.publish_output_s) + polls_per_s * COSTS.poll_s
    assert result["busy"] == pytest.approx(busy + sent_per_s * COSTS.poll_byte_s, rel=0.1)


def test_a_full_actor_lets_the_mirrors_fall_behind() -> None:
    """It cannot send more than its time allows; no message waits for ever."""
    result = Fleet(COSTS, 400, 20.0, CONFIG).run()
    assert result["busy"] > 0.99
    assert result["behind_kb"] * 1e3 > MAX_REPLY_BYTES
    assert result["sent_mb_per_s"] * 1e6 * COSTS.poll_byte_s < 1.0


@pytest.mark.slow
def test_the_largest_fleet_shrinks_with_what_a_replica_generates() -> None:
    fast = largest_fleet(COSTS, 40_000 / OUTPUT_TOKENS, CONFIG)
    slow = largest_fleet(COSTS, 4_000 / OUTPUT_TOKENS, CONFIG)
    assert 4 <= fast < slow / 2

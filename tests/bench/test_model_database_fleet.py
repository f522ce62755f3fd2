"""The simulation of a fleet against one model database gives what can be computed by hand."""

from __future__ import annotations

import pytest

from actors.readers import MAX_POLLS_PER_S
from benchmarks.model_database_fleet import (
    OUTPUT_TOKENS,
    Costs,
    Division,
    Fleet,
    largest_fleet,
    simulate,
)
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


def test_shards_divide_bytes_and_not_calls() -> None:
    """Where every replica is in touch with all; with one each, they divide the fleet."""
    size, outputs_per_s = 24, 2.0
    whole = simulate(COSTS, size, outputs_per_s, CONFIG, Division())
    met_by_all = simulate(COSTS, size, outputs_per_s, CONFIG, Division(4, 4))
    assert met_by_all["sent_mb_per_s"] == pytest.approx(whole["sent_mb_per_s"] / 4, rel=0.1)
    polls_per_s = size / CONFIG.poll_interval_s
    for result, num_met in ((whole, 1), (met_by_all, 4)):
        wanted = polls_per_s + size * outputs_per_s / num_met
        assert result["calls_per_s"] == pytest.approx(wanted, rel=0.05)
    apart = simulate(COSTS, size, outputs_per_s, CONFIG, Division(4, 1))
    quarter = simulate(COSTS, size // 4, outputs_per_s, CONFIG, Division())
    divided = {"replicas", "num_shards"}
    assert {key: apart[key] for key in apart.keys() - divided} == {
        key: quarter[key] for key in quarter.keys() - divided
    }


@pytest.mark.slow
def test_more_shards_carry_more_replicas() -> None:
    largest = [
        largest_fleet(COSTS, 4_000 / OUTPUT_TOKENS, CONFIG, division)
        for division in (Division(), Division(4, 4), Division(4, 1))
    ]
    assert largest[0] < largest[1] < largest[2]
    assert largest[2] == pytest.approx(4 * largest[0], abs=4)


@pytest.mark.slow
def test_the_largest_fleet_shrinks_with_what_a_replica_generates() -> None:
    fast = largest_fleet(COSTS, 40_000 / OUTPUT_TOKENS, CONFIG)
    slow = largest_fleet(COSTS, 4_000 / OUTPUT_TOKENS, CONFIG)
    assert 4 <= fast < slow / 2

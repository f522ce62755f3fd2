"""How many replicas one model database's actor can serve.

    python -m benchmarks.model_database_fleet [--tokens-per-s 500] [--shards 4] [--json OUT]

First the costs of messages are measured on a real actor, behind Ray, with many calls under way: the
processor time that its process takes, all threads of it, which what else runs on the machine hardly
changes.  Then fleets are simulated against one actor with these costs:
calls wait in one queue, replicas publish and poll as ``actors/publisher.py`` and
``actors/subscription.py`` do, and the actor sets the pace as ``actors/model_database.py`` does.

With shards there are as many actors, each with a core of its own and an equal part of what is
generated, so one of them is simulated.  A replica is in touch with all of them, when each serves
requests of every namespace, or with one, when requests of a namespace go to the same few replicas.
"""

from __future__ import annotations

import heapq
import json
import os
import platform
import random
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import typer
from rich.console import Console
from rich.table import Table

from actors import model_database
from actors.readers import MAX_CATCH_UP_CALLS_PER_S, MAX_POLLS_PER_S
from actors.stop import stop_actors
from benchmarks.model_database import KEY, OUTPUT_TOKENS, Publications
from hdserve.bench.environment import commit
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.messages import MAX_REPLY_BYTES, Poll, Position

NUM_CALLS = 400
NUM_ROUNDS = 7
WARM_UP_S = 20.0
MEASURED_S = 20.0
MAX_BUSY = 0.7


@dataclass(frozen=True)
class Costs:
    """Seconds the actor is busy with a message, and bytes of an output on the wire."""

    publish_s: float
    publish_output_s: float
    poll_s: float
    poll_byte_s: float
    output_bytes: float


@dataclass
class Fleet:
    """The state of a simulation; times in seconds, ``log_bytes`` what was published so far."""

    costs: Costs
    num_replicas: int
    outputs_per_s: float
    config: ModelDatabaseConfig
    random: random.Random = field(default_factory=lambda: random.Random(0))
    free_s: float = 0.0
    busy_s: float = 0.0
    log_bytes: float = 0.0
    sent_bytes: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    ages_s: list[float] = field(default_factory=list)
    lags_bytes: list[float] = field(default_factory=list)

    def run(self) -> dict[str, float]:
        end_s = WARM_UP_S + MEASURED_S
        cursors = [0.0] * self.num_replicas
        last_poll_s = [0.0] * self.num_replicas
        last_publish_s = [0.0] * self.num_replicas
        events: list[tuple[float, int, int]] = []
        for replica in range(self.num_replicas):
            start_s = self.random.uniform(0.0, self._pace_s(True))
            heapq.heappush(events, (start_s, 0, replica))
            first_s = self.random.uniform(0.0, self.config.publish_interval_s)
            heapq.heappush(events, (first_s, 1, replica))
        while events and events[0][0] < end_s:
            now_s, kind, replica = heapq.heappop(events)
            if kind:
                done_s = self._publish(now_s, now_s - last_publish_s[replica])
                last_publish_s[replica] = now_s
                next_s = max(done_s, now_s + self.config.publish_interval_s)
            else:
                missing = (self.log_bytes - cursors[replica]) * (1 - 1 / self.num_replicas)
                reply = min(missing, MAX_REPLY_BYTES)
                share = reply / missing if missing else 1.0
                cursors[replica] += (self.log_bytes - cursors[replica]) * share
                cost_s = self.costs.poll_s + reply * self.costs.poll_byte_s
                done_s = self._serve(now_s, cost_s)
                if now_s >= WARM_UP_S:
                    self.sent_bytes += reply
                    self.ages_s.append(done_s - last_poll_s[replica])
                    self.lags_bytes.append(missing - reply)
                last_poll_s[replica] = done_s
                next_s = done_s + self._pace_s(reply == missing) * self.random.uniform(0.9, 1.1)
            heapq.heappush(events, (next_s, kind, replica))
        return self._result()

    def _publish(self, now_s: float, elapsed_s: float) -> float:
        expected = self.outputs_per_s * elapsed_s
        num_outputs = int(expected) + (self.random.random() < expected % 1)
        if not num_outputs:
            return now_s
        self.log_bytes += num_outputs * self.costs.output_bytes
        cost_s = self.costs.publish_s + num_outputs * self.costs.publish_output_s
        return self._serve(now_s, cost_s)

    def _serve(self, now_s: float, cost_s: float) -> float:
        """When a call that arrives now is answered."""
        start_s = max(now_s, self.free_s)
        self.free_s = start_s + cost_s
        if now_s >= WARM_UP_S:
            self.busy_s += cost_s
            self.waits_s.append(start_s - now_s)
        return self.free_s

    def _pace_s(self, is_complete: bool) -> float:
        if not is_complete:
            return self.num_replicas / MAX_CATCH_UP_CALLS_PER_S
        return max(self.config.poll_interval_s, self.num_replicas / MAX_POLLS_PER_S)

    def _result(self) -> dict[str, float]:
        return {
            "replicas": self.num_replicas,
            "busy": min(1.0, self.busy_s / MEASURED_S),
            "calls_per_s": len(self.waits_s) / MEASURED_S,
            "wait_median_ms": 1000 * statistics.median(self.waits_s),
            "wait_p99_ms": 1000 * float(np.quantile(self.waits_s, 0.99)),
            "age_p99_s": float(np.quantile(self.ages_s, 0.99)),
            "sent_mb_per_s": self.sent_bytes / MEASURED_S / 1e6,
            "behind_kb": statistics.median(self.lags_bytes) / 1e3,
        }


def main(
    tokens_per_s: Annotated[float, typer.Option(help="Generated by each replica.")] = 500.0,
    replicas: Annotated[list[int] | None, typer.Option(help="Sizes of fleets.")] = None,
    shards: Annotated[
        list[int] | None, typer.Option(help="`model_database.num_shards`, besides 1.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, simulate, and print one table."""
    costs = measure()
    config = ModelDatabaseConfig()
    outputs_per_s = tokens_per_s / OUTPUT_TOKENS
    divisions = [Division()]
    divisions += [Division(num, num_met) for num in shards or () for num_met in (num, 1)]
    rows = [
        simulate(costs, size, outputs_per_s, config, division)
        for division in divisions
        for size in replicas or [10, 30, 100, 300, 1000]
    ]
    report(costs, tokens_per_s, rows, json_path)
    for division in divisions:
        largest = largest_fleet(costs, outputs_per_s, config, division)
        Console().print(
            f"{division.num_shards} actors, a replica in touch with {division.num_met}: "
            f"{MAX_BUSY:.0%} busy with {largest} replicas"
        )


@dataclass(frozen=True)
class Division:
    """Actors that share the namespaces, and how many of them a replica is in touch with."""

    num_shards: int = 1
    num_met: int = 1


def simulate(
    costs: Costs,
    num_replicas: int,
    outputs_per_s: float,
    config: ModelDatabaseConfig,
    division: Division,
) -> dict[str, float]:
    """Return what one actor of a fleet goes through; they are all alike."""
    num_in_touch = max(1, round(num_replicas * division.num_met / division.num_shards))
    result = Fleet(costs, num_in_touch, outputs_per_s / division.num_met, config).run()
    return {"replicas": num_replicas, **asdict(division), **result | {"replicas": num_replicas}}


def largest_fleet(
    costs: Costs,
    outputs_per_s: float,
    config: ModelDatabaseConfig,
    division: Division | None = None,
) -> int:
    """Return the most replicas that leave the actors some time; found by doubling, then halving."""

    def fits(size: int) -> bool:
        result = simulate(costs, size, outputs_per_s, config, division or Division())
        return result["busy"] <= MAX_BUSY

    high = 8
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        size = (low + high) // 2
        low, high = (size, high) if fits(size) else (low, size)
    return low


def measure() -> Costs:
    """Return the costs on this machine: medians over rounds."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        actor = model_database.get_or_create(KEY, ModelDatabaseConfig())
        messages = Publications("a-replica#0123456789ab")
        one, many = 1, 80
        publish_one_s = call_s(actor, actor.publish, [messages.next(one) for _ in range(NUM_CALLS)])
        publish_many_s = call_s(
            actor, actor.publish, [messages.next(many) for _ in range(NUM_CALLS // 8)]
        )
        behind = Poll("reader", "", {"n": Position()}).encode(KEY)
        current = Poll("reader", "", {"unused": Position()}).encode(KEY)
        poll_s = call_s(actor, actor.changes_since, [current] * NUM_CALLS)
        poll_full_s = call_s(actor, actor.changes_since, [behind] * (NUM_CALLS // 8))
        reply_bytes = len(ray.get(actor.changes_since.remote(behind)))
        output_s = max(publish_many_s - publish_one_s, 0.0) / (many - one)
        return Costs(
            publish_s=publish_one_s - output_s,
            publish_output_s=output_s,
            poll_s=poll_s,
            poll_byte_s=max(poll_full_s - poll_s, 0.0) / reply_bytes,
            output_bytes=(len(messages.next(many)) - len(messages.next(one))) / (many - one),
        )
    finally:
        stop_actors(model=KEY.model)
        ray.shutdown()


def call_s(actor: Any, method: Any, arguments: list[bytes]) -> float:
    """Processor time of the actor per call, while all of them are under way."""
    times = []
    for _ in range(NUM_ROUNDS):
        start_s = processor_s(actor)
        ray.get([method.remote(argument) for argument in arguments])
        times.append((processor_s(actor) - start_s) / len(arguments))
    return statistics.median(times)


def processor_s(actor: Any) -> float:
    """Return what the actor's process has taken so far."""
    found: float = ray.get(actor.__ray_call__.remote(lambda _: time.process_time()))
    return found


def report(
    costs: Costs, tokens_per_s: float, rows: list[dict[str, float]], json_path: Path | None
) -> None:
    """Print a table, and write what is in it."""
    hardware = f"{platform.machine()}, {os.cpu_count()} cores"
    console = Console(width=120)
    console.print(
        f"measured: publish {1000 * costs.publish_s:.2f} ms + "
        f"{1000 * costs.publish_output_s:.3f} ms an output of {OUTPUT_TOKENS} tokens, "
        f"{costs.output_bytes:.0f} bytes; poll {1000 * costs.poll_s:.2f} ms + "
        f"{1e6 * 1000 * costs.poll_byte_s:.2f} ms a MB"
    )
    title = f"{tokens_per_s:g} tokens/s a replica, one of the actors; {hardware}, commit {commit()}"
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        cells = (f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in row.values())
        table.add_row(*cells)
    console.print(table)
    if json_path:
        result = {"hardware": hardware, "commit": commit(), "costs": asdict(costs), "rows": rows}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)

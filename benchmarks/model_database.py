"""What sharing generated text costs: publish, poll, bytes on the wire, delivery, restart.

    python benchmarks/model_database.py [--tokens 10000000] [--json OUT]

Prints one table with the median and the 99th percentile of each measurement.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import ray
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from actors import model_database
from actors.mirror import Mirror
from actors.model_database_actor import ModelDatabaseActor
from actors.stop import stop_actors
from hdserve.bench.environment import commit
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.messages import Poll, Position, Publish
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey

KEY = DatabaseKey("benchmark", "f" * 32)
OUTPUT_TOKENS = 200

Rows = list[dict[str, str | float]]


class Sink:
    """A receiver that remembers when something last came."""

    def __init__(self) -> None:
        self.num_outputs = 0
        self.last_s = 0.0

    def deliver(self, model: str, namespace: str, outputs: list[NDArray[np.uint32]]) -> None:
        self.num_outputs += len(outputs)
        self.last_s = time.perf_counter()

    def is_behind(self) -> bool:
        return False

    def deliver_calibration(self, model: str, namespace: str, calibration: bytes) -> None:
        pass

    def forget(self, model: str, namespace: str) -> None:
        pass


class Publications:
    """Messages of made-up outputs, each different."""

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._random = np.random.default_rng(0)
        self._first = 0

    def next(self, num_outputs: int) -> bytes:
        ids = self._random.integers(0, 32_000, (num_outputs, OUTPUT_TOKENS), np.uint32)
        segment = Segment.from_outputs(self._sender, self._first, list(ids))
        self._first += num_outputs
        return Publish(self._sender, {"n": segment}).encode(KEY)


def main(
    tokens: Annotated[int, typer.Option(help="Tokens in the database for the restart.")] = 10**7,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Run all measurements."""
    rows: Rows = []
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with tempfile.TemporaryDirectory() as directory:
        config = ModelDatabaseConfig(snapshot_dir=Path(directory))
        try:
            measure_wire(rows)
            measure_calls(rows, config)
            measure_mirror(rows, config)
            measure_restart(rows, config, tokens)
        finally:
            stop_actors(model=KEY.model)
            ray.shutdown()
    report(rows, json_path)


def measure_wire(rows: Rows) -> None:
    messages = Publications("a-replica#0123456789ab")
    for num_outputs in (1, 10, 80):
        size = len(messages.next(num_outputs)) / (num_outputs * OUTPUT_TOKENS)
        add(rows, f"publish, {num_outputs} outputs of {OUTPUT_TOKENS}", "bytes/token", [size])


def measure_calls(rows: Rows, config: ModelDatabaseConfig) -> None:
    """Measure calls through Ray, and the same calls on the object itself."""
    actor = model_database.get_or_create(KEY, config)
    ray.get(actor.info.remote())
    local = ModelDatabaseActor(KEY, config.model_copy(update={"snapshot_dir": None}))
    calls: dict[str, tuple[Callable[[bytes], object], Callable[[bytes], object]]] = {
        "through Ray": (
            lambda data: ray.get(actor.publish.remote(data)),
            lambda data: ray.get(actor.changes_since.remote(data)),
        ),
        "without Ray and disk": (local.publish, local.changes_since),
    }
    for where, (publish, poll) in calls.items():
        messages = Publications(where)
        for num_outputs in (1, 80):
            data = [messages.next(num_outputs) for _ in range(200)]
            add(rows, f"publish {num_outputs} outputs, {where}", "ms", timed(publish, data))
        behind = Poll("r", "", {"n": Position()}).encode(KEY)
        add(rows, f"poll, 96 KiB reply, {where}", "ms", timed(poll, [behind] * 200))
        current = Poll(where, "", {"unused": Position()}).encode(KEY)
        add(rows, f"poll, nothing new, {where}", "ms", timed(poll, [current] * 500))


def measure_mirror(rows: Rows, config: ModelDatabaseConfig) -> None:
    """Measure the caller's cost, and the time until another replica has the output."""
    sink = Sink()
    sender, receiver = Mirror(KEY, config, Sink()), Mirror(KEY, config, sink)
    for mirror in (sender, receiver):
        mirror.start()
        mirror.use("m")
    receiver.wait_until_current(60.0)
    ids = list(range(OUTPUT_TOKENS))
    costs = timed(lambda _: sender.publish("m", ids), [b""] * 1000)
    add(rows, "Mirror.publish, cost to the caller", "us", [1000 * cost for cost in costs])
    while sink.num_outputs < 1000:
        time.sleep(0.01)
    delays = []
    for count in range(30):
        start_s = time.perf_counter()
        sender.publish("m", ids)
        while sink.num_outputs <= 1000 + count:
            time.sleep(0.001)
        delays.append(1000 * (sink.last_s - start_s))
    add(rows, "delivery to another replica", "ms", delays)
    sender.close()
    receiver.close()


def measure_restart(rows: Rows, config: ModelDatabaseConfig, tokens: int) -> None:
    """Kill the actor with a full database, and measure how long it takes until it answers again."""
    actor = model_database.get_or_create(KEY, config)
    messages = Publications("filler")
    for _ in range(tokens // (80 * OUTPUT_TOKENS)):
        ray.get(actor.publish.remote(messages.next(80)))
    add(rows, "snapshot_now", "ms", timed(lambda _: ray.get(actor.snapshot_now.remote()), [b""]))
    before = ray.get(actor.info.remote())
    times = []
    for _ in range(3):
        pid = ray.get(actor.info.remote())["pid"]
        start_s = time.perf_counter()
        ray.kill(actor, no_restart=False)
        after = {"pid": pid}
        while after["pid"] == pid:
            try:
                after = ray.get(actor.info.remote())
            except ray.exceptions.RayActorError:
                time.sleep(0.01)
        times.append(1000 * (time.perf_counter() - start_s))
        if after["num_bytes"] != before["num_bytes"]:
            raise RuntimeError("the restart lost outputs")
    size = before["num_bytes"] / 2**20
    add(rows, f"kill to first answer, {size:.0f} MiB of outputs", "ms", times)
    stop_actors(model=KEY.model)
    reading = timed(lambda _: ModelDatabaseActor(KEY, config), [b""])
    add(rows, "of which reading them back", "ms", reading)


def timed(call: Callable[[bytes], object], arguments: list[bytes]) -> list[float]:
    """Return the milliseconds of each call."""
    times = []
    for argument in arguments:
        start_s = time.perf_counter()
        call(argument)
        times.append(1000 * (time.perf_counter() - start_s))
    return times


def add(rows: Rows, name: str, unit: str, values: list[float]) -> None:
    """Add another row, of what was measured again and again."""
    rows.append(
        {
            "measurement": name,
            "unit": unit,
            "median": statistics.median(values),
            "p99": float(np.quantile(values, 0.99)),
            "runs": len(values),
        }
    )


def report(rows: Rows, json_path: Path | None) -> None:
    """Print a table, and write what is in it."""
    hardware = f"{platform.machine()}, {os.cpu_count()} cores"
    table = Table(title=f"model database, {hardware}, commit {commit()}")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        cells = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()]
        table.add_row(*cells)
    Console().print(table)
    if json_path:
        result = {"hardware": hardware, "commit": commit(), "rows": rows}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)

"""What is logged in Ray's processes is in files of Ray's, with the time and how bad it is."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import ray
from ray._private.worker import global_worker

from actors import detached
from tests.waiting import WAIT_S

SERVE = """
import logging
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig
from actors.logs import log_tracing_with_serve, log_with_serve

def configure(**options):
    config = LoggingConfig(logs_dir=".", **options)
    configure_component_logger(
        component_name="m", component_id="r", logging_config=config, max_bytes=0, backup_count=0
    )

logger = logging.getLogger("deployments.replica.somewhere")
configure()
log_with_serve()
log_with_serve()
for level in ("DEBUG", "INFO"):
    logger.log(logging.getLevelNamesMapping()[level], "as text")
log_tracing_with_serve()
logging.getLogger("opentelemetry.sdk.somewhere").warning("traces are lost")
logging.getLogger("opentelemetry.trace.span").warning("what a client sent")
configure(log_level="ERROR")
logger.warning("not bad enough")
configure(encoding="JSON", log_level="DEBUG")
logger.debug("as JSON")
"""


class Talker:
    """Says what it is told."""

    def say(self, level: int, text: str) -> None:
        logging.getLogger("hdserve.databases.somewhere").log(level, text)


@pytest.fixture
def talker(ray_cluster: None) -> Iterator[ray.actor.ActorHandle]:
    actor = detached.get_or_create(Talker, uuid4().hex, 0, {})
    yield actor
    ray.kill(actor)


def lines(text: str) -> list[str]:
    """Of all actors' files, those with ``text``."""
    assert global_worker.node is not None
    paths = Path(global_worker.node.get_logs_dir_path()).glob("worker-*.err")
    return [line for path in paths for line in path.read_text().splitlines() if text in line]


@pytest.mark.ray
def test_what_an_actor_says(talker: ray.actor.ActorHandle) -> None:
    """All but what helps to find faults, each once; Ray shows it by the name of its class."""
    text = uuid4().hex
    for level in (logging.DEBUG, logging.INFO, logging.ERROR):
        ray.get(talker.say.remote(level, text), timeout=WAIT_S)
    deadline_s = time.monotonic() + WAIT_S
    while len(lines(text)) < 2:
        assert time.monotonic() < deadline_s, lines("")
        time.sleep(0.05)
    told = [re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", "TIME", line) for line in lines(text)]
    name = "hdserve.databases.somewhere"
    assert told == [f"INFO TIME {name} -- {text}", f"ERROR TIME {name} -- {text}"]
    assert "Talker" in repr(talker)


def test_what_a_replica_says_is_logged_as_ray_serve_does(tmp_path: Path) -> None:
    """Where, how and from which level on, which may change; once in each place.  What sends traces
    says that some are lost, but not what clients sent."""
    ended = subprocess.run(
        [sys.executable, "-c", SERVE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (path,) = tmp_path.glob("*.log")
    text, lost, as_json = path.read_text().splitlines()
    assert re.fullmatch(r"INFO \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} m r -- as text", text)
    assert re.fullmatch(r"WARNING .* m r -- traces are lost", lost)
    found = json.loads(as_json)
    assert (found["levelname"], found["message"]) == ("DEBUG", "as JSON")
    assert [line.rpartition(" -- ")[2] for line in ended.stderr.splitlines()] == [
        "as text",
        "traces are lost",
        "as JSON",
    ]

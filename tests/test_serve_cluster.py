"""``hdserve serve`` with Ray: it answers, and ends with all it started."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import openai
import pytest
import yaml
from ray.util import list_named_actors

from benchmarks.server import START_TIMEOUT_S, wait_until_ready
from hdserve.config.deployed import APPLICATION, GATEWAY_DEPLOYMENT, IMPORT_PATH
from tests.clusters import connected_cluster
from tests.marked_processes import END_S, family, hdserve, started, wait_for, wait_until_gone
from tests.ports import free_port
from tests.waiting import eventually

pytestmark = pytest.mark.ray

INTERRUPTED = """
import os, signal, threading
import ray
from deployments.runner import until_interrupted
ray.init(address="local", num_cpus=0, include_dashboard=False)
never = ray.remote(num_cpus=1)(lambda: None).remote()
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
with until_interrupted():
    ray.get(never)
print("ended")
"""


@pytest.mark.slow
def test_it_ends_when_the_application_cannot_be_built(tmp_path: Path) -> None:
    """On whatever node; nobody would ever be answered."""
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {"config": str(tmp_path / "nothing.yaml")},
    }
    http_options = {"host": "127.0.0.1", "port": free_port()}
    path, log = tmp_path / "serve.json", tmp_path / "log"
    path.write_text(json.dumps({"http_options": http_options, "applications": [application]}))
    program = "from deployments.runner import main; main()"
    variables = {"RAY_AUTH_MODE": "disabled"}
    with started(log, "-c", program, str(path), "local", "1", **variables) as (process, mark):
        assert process.wait(START_TIMEOUT_S) == 1
        wait_until_gone(mark)
    *_, last = log.read_text().splitlines()
    assert last.startswith("hdserve: the application was not built: ")
    assert "nothing.yaml: No such file or directory" in last


@pytest.mark.slow
def test_it_ends_when_a_model_cannot_be_loaded(tmp_path: Path) -> None:
    """The reason is the last line, whatever Ray has said of it before."""
    engine = {"compile": False, "kv_cache_tokens": 10**12}
    model = {"name": "m", "model": "hdserve-mini", "engine": engine}
    log = tmp_path / "log"
    with started(log, "-c", served(tmp_path, model), RAY_AUTH_MODE="disabled") as (process, mark):
        assert process.wait(START_TIMEOUT_S) == 1
        wait_until_gone(mark)
    *_, last = log.read_text().splitlines()
    assert last.startswith("hdserve: model-m does not start: a KV cache of 1000000000000 tokens")


def test_it_ends_when_there_will_never_be_room(tmp_path: Path) -> None:
    """On a cluster of this machine alone."""
    model = {"name": "m", "model": "hdserve-mini", "num_cpus": 10_000}
    log = tmp_path / "log"
    with started(log, "-c", served(tmp_path, model), RAY_AUTH_MODE="disabled") as (process, mark):
        assert process.wait(START_TIMEOUT_S) == 1
        wait_until_gone(mark)
    *_, first, second = log.read_text().splitlines()
    assert first.startswith("hdserve: m: resources: 1 of 1 processes cannot be placed")
    assert second.startswith("  to mend it: num_cpus: ")


def test_it_starts_ray_without_a_home(tmp_path: Path) -> None:
    """As a user of a container may be, with the token that Ray asks for by default; and where the
    path of temporary files has no room for its sockets."""
    model = {"name": "m", "model": "hdserve-mini", "num_cpus": 10_000}
    log = tmp_path / "log"
    program = "import os; os.environ.pop('RAY_AUTH_MODE', None); " + served(tmp_path, model)
    with (
        TemporaryDirectory(prefix=40 * "d", dir="/tmp") as place,
        started(log, "-c", program, HOME="/dev/null", TMPDIR=place) as (process, mark),
    ):
        assert process.wait(START_TIMEOUT_S) == 1
        wait_until_gone(mark)
    assert "Traceback" not in log.read_text()
    assert "hdserve: m: resources: 1 of 1 processes cannot be placed" in log.read_text()


def served(directory: Path, model: dict[str, Any]) -> str:
    """A program that serves one model."""
    config = directory / "config.yaml"
    database = {"is_enabled": False}
    config.write_text(yaml.safe_dump({"models": [model], "model_database": database}))
    return hdserve("serve", "--config", str(config), "--port", str(free_port()))


@pytest.mark.slow
def test_it_waits_for_nothing_in_ray_once_it_is_told_to_end(tmp_path: Path) -> None:
    """What Ray is asked may never be answered, as by a cluster that has no room."""
    log = tmp_path / "log"
    with started(log, "-c", INTERRUPTED, RAY_AUTH_MODE="disabled") as (process, _):
        assert process.wait(START_TIMEOUT_S) == 0, log.read_text()
    assert "ended" in log.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_and_ends(number: signal.Signals, tmp_path: Path) -> None:
    """With every process it started, whichever signal ends it: first what it has begun to answer,
    and without a traceback.  HAProxy, with its files where nobody else gets, is among them."""
    log = tmp_path / "log"
    with serving(tmp_path, log) as (process, mark, client):
        directories = {path.parents[1] for path in haproxy_configurations(mark)}
        assert [path.stat().st_mode & 0o777 for path in directories] == [0o700]
        answer = client.completions.create(
            model="m", prompt="A table for", max_tokens=8, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        for name, value in (("x-request-timeout-seconds", "0.001"), ("x-session-id", b"caf\xe9")):
            assert answer_of(client, {name: value}).status_code == 200
        assert answer_of(client, {"host": "page.example"}).status_code == 403
        with begun(client, 600) as stream:
            process.send_signal(number)
            *_, last = (chunk for chunk in stream if chunk.choices)
        assert last.choices[0].finish_reason == "length"
        assert process.wait(END_S) == 128 + number
        wait_until_gone(mark)
    assert "ending: what is being answered may take 50 s more" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_it_ends_where_the_command_is_killed(tmp_path: Path) -> None:
    """As by the system, for memory: what has begun is answered, and nothing is left."""
    log = tmp_path / "log"
    with serving(tmp_path, log) as (process, mark, client):
        directories = {path.parents[1] for path in haproxy_configurations(mark)}
        with begun(client, 600) as stream:
            process.kill()
            *_, last = (chunk for chunk in stream if chunk.choices)
        assert last.choices[0].finish_reason == "length"
        wait_until_gone(mark)
    assert directories
    assert not any(directory.exists() for directory in directories)


@pytest.mark.slow
def test_who_asks_while_it_ends_is_answered(tmp_path: Path) -> None:
    """That it ends, as long as there is a gateway; nobody waits for a replica that never comes, and
    the end for nobody.  What had begun before is answered."""
    log = tmp_path / "log"
    with serving(tmp_path, log) as (process, mark, client), ThreadPoolExecutor(64) as pool:
        long = pool.submit(
            client.completions.create,
            model="m",
            prompt="Go on",
            max_tokens=1900,
            n=4,
            extra_body={"ignore_eos": True},
        )
        time.sleep(0.2)
        asked = []
        while process.poll() is None:
            if len(asked) == 20:
                process.send_signal(signal.SIGINT)
            asked.append(pool.submit(answer_of, client, {}))
            time.sleep(0.05)
        assert process.returncode == 128 + signal.SIGINT
        assert len(long.result().choices) == 4
        answers = [each.result() for each in asked if each.exception() is None]
        wait_until_gone(mark)
    gone = [each.exception() for each in asked if each.exception() is not None]
    assert all(isinstance(error, httpx.TransportError) for error in gone)
    assert {answer.status_code for answer in answers} <= {200, 404, 503}
    refused = [answer.json() for answer in answers if answer.status_code == 503]
    assert "shutting_down" in {body["error"]["code"] for body in refused}


@pytest.mark.slow
def test_it_ends_at_once(tmp_path: Path) -> None:
    """When it is told so twice, though it answers somebody: the stream is cut, or a gateway that
    lives a moment longer than the replica says so."""
    log = tmp_path / "log"
    with serving(tmp_path, log) as (process, mark, client), begun(client, 1900) as stream:
        process.send_signal(signal.SIGINT)
        wait_for("ending: what is being answered", log, process)
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError):
            list(stream)
        assert process.wait(END_S) == 128 + signal.SIGINT
        wait_until_gone(mark)


@pytest.mark.slow
def test_it_leaves_nothing_on_a_cluster_of_others(tmp_path: Path) -> None:
    """When it is told twice to end, though it answers somebody, and its gateways take no requests
    any more: they would say so for ever."""

    def actors() -> list[str]:
        """All of Ray Serve on the cluster that have not ended; databases stay."""
        found = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
        return [name for name in found if name.startswith("SERVE_")]

    with connected_cluster(2) as cluster:
        log = tmp_path / "log"
        with serving(tmp_path, log, cluster.address) as (process, _, client):
            assert any(GATEWAY_DEPLOYMENT in name for name in actors())
            with begun(client, 1900):
                process.send_signal(signal.SIGINT)
                eventually(lambda: answer_of(client, {}).status_code == 503)
                process.send_signal(signal.SIGINT)
                assert process.wait(END_S) == 128 + signal.SIGINT
        eventually(lambda: not actors(), pause_s=0.5)


def haproxy_configurations(mark: str) -> Iterator[Path]:
    """The files that the HAProxy processes which carry ``mark`` have read."""
    for pid in family(mark):
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if command[0].endswith("/haproxy"):
            yield Path(command[command.index("-f") + 1])


def wait_for_line(log: Path, line: str) -> None:
    deadline = time.monotonic() + END_S
    while line not in log.read_text().splitlines():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@contextmanager
def serving(
    directory: Path, log: Path, address: str = "local"
) -> Iterator[tuple[subprocess.Popen[str], str, openai.OpenAI]]:
    """``hdserve serve`` when it is ready, its mark, and a client of it."""
    port = free_port()
    config = directory / "config.yaml"
    model = {"name": "m", "model": "hdserve-mini", "engine": {"compile": False}}
    config.write_text(yaml.safe_dump({"models": [model], "drain_timeout_s": 50}))
    program = hdserve("serve", "--config", str(config), "--port", str(port))
    base_url = f"http://127.0.0.1:{port}"
    with (
        started(log, "-c", program, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled") as (
            process,
            mark,
        ),
        openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client,
    ):
        wait_until_ready(process, base_url, log)
        wait_for_line(log, f"hdserve is ready at {base_url}")
        yield process, mark, client


def answer_of(client: openai.OpenAI, headers: Mapping[str, str | bytes]) -> httpx.Response:
    """To a request with headers of Ray Serve's."""
    body = {"model": "m", "prompt": "Go on", "max_tokens": 40}
    url = f"{client.base_url}completions"
    return httpx.post(url, json=body, headers=list(headers.items()), timeout=60)


def begun(client: openai.OpenAI, max_tokens: int) -> openai.Stream[openai.types.Completion]:
    """A stream of which the first chunk is there."""
    stream = client.completions.create(
        model="m",
        prompt="Go on",
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    return stream

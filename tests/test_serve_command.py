"""``hdserve serve`` as a user runs it: it answers, and ends with all it started."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest
import yaml
from ray.util import list_named_actors
from typer.testing import CliRunner

from benchmarks.server import START_TIMEOUT_S, wait_until_ready
from hdserve.cli import serve
from hdserve.cli.commands import app
from hdserve.cli.serve import announce, check_is_free, pauses_s, url_of
from hdserve.config.deployed import APPLICATION, GATEWAY_DEPLOYMENT, IMPORT_PATH
from hdserve.errors import ConfigError
from tests.clusters import connected_cluster
from tests.ports import free_port
from tests.waiting import eventually


class Ready(BaseHTTPRequestHandler):
    """Answers that everything is ready."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


END_S = 20.0
"""It promises 10 s; a machine that runs other tests gets more."""

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: print("told", flush=True))
subprocess.Popen(["sleep", "600"], process_group=0)
print("ready", flush=True)
while True:
    signal.pause()
"""

ORDERLY = """
import signal, time
def end(*_):
    time.sleep(1)
    print("what had begun has ended", flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGINT, end)
print("ready", flush=True)
signal.pause()
"""

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


@pytest.fixture
def holding() -> Iterator[ExitStack]:
    """What keeps ports from others during a test."""
    with ExitStack() as found:
        yield found


@contextmanager
def started(
    log: Path, *command: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that writes to ``log``, and the mark that its environment and that of all its
    children carries."""
    mark = f"HDSERVE_TEST={uuid4().hex}"
    name, _, value = mark.partition("=")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **variables, name: value},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process, mark
        finally:
            for pid in family(mark):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def family(mark: str) -> list[int]:
    """The processes that carry ``mark``."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:
            continue
    return found


def haproxy_configurations(mark: str) -> Iterator[Path]:
    """The files that the HAProxy processes which carry ``mark`` have read."""
    for pid in family(mark):
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if command[0].endswith("/haproxy"):
            yield Path(command[command.index("-f") + 1])


def wait_until_gone(mark: str) -> None:
    deadline = time.monotonic() + END_S
    while family(mark):
        assert time.monotonic() < deadline, family(mark)
        time.sleep(0.05)


def hdserve(*arguments: str) -> str:
    """A program that is the command."""
    return f"import sys; sys.argv[1:] = {arguments!r}; from hdserve.cli import main; main()"


def wait_for_line(log: Path, line: str) -> None:
    deadline = time.monotonic() + END_S
    while line not in log.read_text().splitlines():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def running(child: str, drain_timeout_s: float, on_hangup: str = "SIG_DFL") -> str:
    """A program that runs ``child`` as the command runs its server, whatever these tests were
    started by does with SIGHUP."""
    return (
        f"import signal; signal.signal(signal.SIGHUP, signal.{on_hangup});"
        "import sys; from hdserve.cli import serve; serve.END_TIMEOUT_S = 0.2;"
        f"sys.exit(serve.run_until_signal([sys.executable, '-c', {child!r}], {drain_timeout_s}))"
    )


def wait_for(text: str, log: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + END_S
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_has_begun_may_end(number: signal.Signals, tmp_path: Path) -> None:
    """For longer than Ray takes to end; one line says how long, and what ends it at once."""
    log = tmp_path / "log"
    with started(log, "-c", running(ORDERLY, 60)) as (process, mark):
        wait_for("ready", log, process)
        process.send_signal(number)
        assert process.wait(END_S) == 128 + number
        wait_until_gone(mark)
    ending = "ending: what is being answered may take 60 s more; Ctrl-C again ends at once"
    assert log.read_text().splitlines() == ["ready", ending, "what had begun has ended"]


def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(log, "-c", running(STUBBORN, 600)) as (process, mark):
        wait_for("ready", log, process)
        process.send_signal(signal.SIGINT)
        wait_for("told", log, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 128 + signal.SIGINT
        wait_until_gone(mark)


def test_what_does_not_end_is_killed(tmp_path: Path) -> None:
    """A child that ignores its signal, and its own one, of another group, end with the command."""
    log = tmp_path / "log"
    with started(log, "-c", running(STUBBORN, 0.2)) as (process, mark):
        wait_for("ready", log, process)
        assert len(family(mark)) > 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 128 + signal.SIGTERM
        wait_until_gone(mark)


def test_it_outlives_its_terminal_where_it_is_told_to(tmp_path: Path) -> None:
    """As by nohup, which has SIGHUP ignored."""
    log = tmp_path / "log"
    with started(log, "-c", running(ORDERLY, 60, "SIG_IGN")) as (process, mark):
        wait_for("ready", log, process)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 128 + signal.SIGTERM
        wait_until_gone(mark)
    assert "what had begun has ended" in log.read_text()


def test_it_ends_in_order_where_nobody_reads(tmp_path: Path) -> None:
    """What it says goes nowhere once its terminal is closed."""
    log = tmp_path / "log"
    deaf = "import sys; sys.stderr = open('/dev/full', 'w'); "
    with started(log, "-c", deaf + running(ORDERLY, 60)) as (process, mark):
        wait_for("ready", log, process)
        process.send_signal(signal.SIGHUP)
        process.wait(END_S)
        wait_until_gone(mark)
    assert "what had begun has ended" in log.read_text()


def test_the_status_of_a_command_that_ends_by_itself(tmp_path: Path) -> None:
    with started(tmp_path / "log", "-c", running("raise SystemExit(7)", 60)) as (process, _):
        assert process.wait(START_TIMEOUT_S) == 7


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("gpu-box", "http://gpu-box:80"),
    ],
)
def test_where_it_answers(host: str, url: str) -> None:
    """An address of IPv6 stands in brackets."""
    assert url_of(host, 80) == url


def test_it_is_ready_past_a_proxy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment's proxy is for others; it may not even reach this machine."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        waiting = threading.Thread(target=announce, args=(url,), daemon=True)
        waiting.start()
        server.timeout = 20
        server.handle_request()
        waiting.join(20)
    assert not waiting.is_alive()
    assert f"hdserve is ready at {url}" in capsys.readouterr().out


def test_it_asks_more_rarely_the_longer_a_start_takes() -> None:
    """What a model says that cannot start is not lost among the log's lines about being asked."""
    pauses = list(islice(pauses_s(), 140))
    assert pauses == sorted(pauses)
    assert sum(pauses[:24]) < 60
    assert sum(pauses) > 600
    assert pauses[-1] <= 5


def test_a_port_that_is_taken_is_told_before_anything_starts(holding: ExitStack) -> None:
    """Whoever starts a second server learns in a second what is wrong, with both names in it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1, port {port}: Address already in use; --port"
        ):
            check_is_free("127.0.0.1", port, holding)
    check_is_free("127.0.0.1", port, holding)
    check_is_free("0.0.0.0", port, holding)
    for host in ("192.0.2.77", "no.such.host.invalid"):  # no other port would do
        with pytest.raises(ConfigError, match=rf"{re.escape(host)}, port {port}: [\w ]+$"):
            check_is_free(host, port, holding)
    with pytest.raises(ConfigError, match="--host is empty"):  # to the system it is every interface
        check_is_free("", port, holding)


def test_a_port_at_which_another_server_is_about_to_listen(holding: ExitStack) -> None:
    """It is told as one that is taken, until that has ended, not when both have started Ray."""
    port = free_port()
    with ExitStack() as of_another:
        check_is_free("127.0.0.1", port, of_another)
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use; --port"):
            check_is_free("127.0.0.1", port, holding)
    check_is_free("127.0.0.1", port, holding)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"access": {"admin_key": "short"}}, "HDSERVE_ADMIN_KEY: a key needs at least 16"),
        ({"access": {"api_keys_file": "/nothing"}}, "cannot read the API keys in /nothing"),
        ({"models": [{"name": "m", "model": "./nothing"}]}, "there is no directory /"),
    ],
)
def test_what_would_not_start_is_told_before_anything_starts(
    section: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster of its own, whose files are those here; not by each of Ray's processes, in
    tracebacks."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"models": [{"name": "m", "model": "hdserve-tiny"}], **section}))
    told, *problems = refusal(monkeypatch, "local", "--config", str(path)).splitlines()
    assert told == f"{path}:"
    assert reason in "".join(problems)


def refusal(monkeypatch: pytest.MonkeyPatch, address: str, *arguments: str) -> str:
    """Why `hdserve serve` starts nothing on the Ray cluster at ``address``."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.delattr(serve, "run_until_signal")
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(
            app, ["serve", "--port", str(free_port()), *arguments], catch_exceptions=False
        )
    return refused.value.message


def deployed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The arguments of the application that the command would run on a cluster of its own."""
    found: list[Any] = []

    def read(command: list[str], *_: Any) -> int:
        (path,) = (word for word in command if word.endswith("serve.json"))
        found.append(json.loads(Path(path).read_text()))
        return 0

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(serve, "run_until_signal", read)
    command = ["serve", "--port", str(free_port()), *arguments]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    ((application,),) = (config["applications"] for config in found)
    return application["args"]


def test_a_model_is_served_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its own name; a directory under that of its last part, wherever Ray was started.  The
    file that the environment names is not served."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HDSERVE_CONFIG", str(tmp_path / "none.yaml"))
    (tmp_path / "own").mkdir()
    place = str(tmp_path / "own")
    for model, name, resolved in (
        ("hdserve-mini", "hdserve-mini", "hdserve-mini"),
        ("OWNER/MODEL", "OWNER/MODEL", "OWNER/MODEL"),
        ("./own", "own", place),
        ("own", "own", place),
        (place + "/", "own", place),
    ):
        wanted = {"config": {"models": [{"name": name, "model": resolved}]}}
        assert deployed(monkeypatch, model) == wanted
    told = refusal(monkeypatch, "local", "hdserve-mini", "--config", "a.yaml")
    assert told == "give a model or --config, not both"


def set_to(*settings: str) -> list[str]:
    """Options that set these."""
    return [word for setting in settings for word in ("--set", setting)]


def test_settings_of_a_model_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their keys in a configuration, in YAML; so they may be sections, too."""
    settings = set_to(
        "engine.max_num_sequences=32",
        "num_gpus=0.5",
        "reasoning_parser=auto",
        "statistics=null",
        "name=assistant",
        "aliases=[a, b=c]",
        "drafting={max_depth: 4}",
        "drafting.max_draft_tokens=8",
    )
    (model,) = deployed(monkeypatch, "hdserve-mini", *settings)["config"]["models"]
    assert model == {
        "name": "assistant",
        "model": "hdserve-mini",
        "engine": {"max_num_sequences": 32},
        "num_gpus": 0.5,
        "reasoning_parser": "auto",
        "statistics": None,
        "aliases": ["a", "b=c"],
        "drafting": {"max_depth": 4, "max_draft_tokens": 8},
    }


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["num_gpu=1"], "models.0.num_gpu: unknown key; did you mean 'num_gpus'?"),
        (["engine.max_num_seqs=1"], "models.0.engine.max_num_seqs: unknown key; did you mean"),
        (["engine.dtype=int3"], "models.0.engine.dtype: auto, "),
        (["num_gpus"], "--set num_gpus: KEY=VALUE is expected, as in num_gpus=0.5"),
        (["engine.=1"], "--set engine.=1: KEY=VALUE is expected"),
        (["=1"], "--set =1: KEY=VALUE is expected"),
        (["aliases=[a"], "--set aliases=[a: line 1, "),
        (["num_gpus=1", "num_gpus=0"], "--set num_gpus=0: num_gpus has a value already"),
        (["engine=1", "engine.dtype=auto"], "--set engine.dtype=auto: engine has a value already"),
        (["model=hdserve-tiny"], "--set model=...: give the model as MODEL"),
    ],
)
def test_settings_that_are_wrong(
    settings: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(monkeypatch, "local", "hdserve-mini", *set_to(*settings)).startswith(reason)


@pytest.mark.parametrize("others", [[], ["--config", "a.yaml"]])
def test_settings_of_a_configuration_are_in_its_file(
    others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several models, nothing says which is meant."""
    told = refusal(monkeypatch, "local", *others, *set_to("num_gpus=1"))
    assert told.startswith("--set num_gpus=1 is for MODEL: in a configuration, write it below ")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("hdserve-none", "no bundled model is called hdserve-none"),
        ("./none", "models.0.model: there is no directory /"),
    ],
)
def test_a_model_that_is_not_there_is_told(
    model: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason in refusal(monkeypatch, "local", model)


def test_the_file_of_the_environment_is_named_in_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the line, as the one of --config is."""
    path = tmp_path / "config.yaml"
    path.write_text("models:\n- name: m\n  model: ./nothing\n")
    monkeypatch.setenv("HDSERVE_CONFIG", str(path))
    told, problem = refusal(monkeypatch, "local").splitlines()
    assert told == f"{path}:"
    assert problem.startswith("line 3, models.0.model: there is no directory")


def test_what_would_not_start_is_the_status_of_the_command(tmp_path: Path) -> None:
    """And its last words, without a traceback."""
    log = tmp_path / "log"
    program = hdserve("serve", "--config", str(tmp_path / "nothing.yaml"))
    with started(log, "-c", program, RAY_ADDRESS="local") as (process, _):
        assert process.wait(END_S) == 2
    assert log.read_text().startswith("hdserve: cannot read the configuration")


@pytest.mark.parametrize(
    "name", ["HDSERVE_API_KEYS_FILE", "HDSERVE_ADMIN_KEY_FILE", "HDSERVE_ADMIN_KEY"]
)
def test_keys_that_a_cluster_would_not_know_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would serve everybody: its processes have an environment of their own."""
    (tmp_path / "keys").write_text("a-key-of-sixteen-characters tenant\n")
    monkeypatch.setenv(name, "k" * 20 if name.endswith("KEY") else str(tmp_path / "keys"))
    told = refusal(monkeypatch, "127.0.0.1:1")
    assert f"{name} would not be known on the Ray cluster 127.0.0.1:1" in told


@pytest.mark.parametrize("is_own", [True, False])
def test_relative_paths_that_a_cluster_would_open_elsewhere_are_told(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a line each; a cluster of its own is started here, and opens what is here."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "models:\n- {name: m, model: hdserve-tiny, statistics: counted}\n"
        "model_database: {snapshot_dir: kept}\n"
    )
    monkeypatch.setattr(serve, "run_until_signal", lambda *_: 0)
    arguments = ["serve", "--config", str(path), "--port", str(free_port())]
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", "local" if is_own else address)
        told = CliRunner().invoke(app, arguments, catch_exceptions=False)
    begins = "is relative: it begins in the directory of `ray start`, not of this command"
    wanted = [
        f"warning: line 3, model_database.snapshot_dir: kept {begins}",
        f"warning: line 2, models.0.statistics: counted {begins}",
    ]
    assert told.exit_code == 0
    assert told.stderr.splitlines() == ([] if is_own else wanted)


@pytest.mark.ray
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


@pytest.mark.ray
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


@pytest.mark.ray
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


def served(directory: Path, model: dict[str, Any]) -> str:
    """A program that serves one model."""
    config = directory / "config.yaml"
    database = {"is_enabled": False}
    config.write_text(yaml.safe_dump({"models": [model], "model_database": database}))
    return hdserve("serve", "--config", str(config), "--port", str(free_port()))


@pytest.mark.ray
@pytest.mark.slow
def test_it_waits_for_nothing_in_ray_once_it_is_told_to_end(tmp_path: Path) -> None:
    """What Ray is asked may never be answered, as by a cluster that has no room."""
    log = tmp_path / "log"
    with started(log, "-c", INTERRUPTED, RAY_AUTH_MODE="disabled") as (process, _):
        assert process.wait(START_TIMEOUT_S) == 0, log.read_text()
    assert "ended" in log.read_text().splitlines()


@pytest.mark.ray
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
        with begun(client, 600) as stream:
            process.send_signal(number)
            *_, last = (chunk for chunk in stream if chunk.choices)
        assert last.choices[0].finish_reason == "length"
        assert process.wait(END_S) == 128 + number
        wait_until_gone(mark)
    assert "ending: what is being answered may take 50 s more" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.ray
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


@pytest.mark.ray
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


@pytest.mark.ray
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


@pytest.mark.ray
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
